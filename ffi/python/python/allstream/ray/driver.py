"""What a driver calls: groups declared for actors that exist, and actors made together with their group (a gang)."""

import secrets
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Union

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from allstream import errors
from allstream.ray.hook import BACKEND, backend_here, register_here

# Seconds that the driver waits beyond the ranks' own timeout, for actors that are still starting; also how long it waits for actors to leave.
_GRACE = 5.0


def create_collective_group(
    actors: Sequence[Any],
    world_size: int,
    ranks: Sequence[int],
    backend: str = "allstream",
    group_name: str = "default",
    gloo_timeout: int = 30_000,
) -> None:
    """Makes the actors a group, and returns when all of them have met.

    Unlike Ray's function of this name it registers the backend on the actors, leaves no detached actor, and reports at once what
    goes wrong. An actor that has joined the same group with the same rank by itself is left as it is.

    Args:
        actors: handles of the actors. Each runs its calls in order, so it joins when the calls that were made before are done.
        world_size: the number of actors.
        ranks: the rank of each, a permutation of 0 to `world_size - 1`.
        backend: "allstream"; "nccl" and "gloo" mean the same here. Any other name is passed on to Ray's function.
        gloo_timeout: how long the ranks wait for each other, and how long an operation may take, in milliseconds.

    Raises:
        RuntimeError: ranks that are no permutation, a world size that is not the number of actors, an actor that has another group of
            this name.
        ValueError: an actor that is there twice.
        TimeoutError: it names the ranks whose actors did not join in time, or the rank whose actor died.
    """
    register_here()
    backend = backend_here(backend)
    if backend.upper() != BACKEND:
        from ray.util.collective import create_collective_group as of_ray

        return of_ray(list(actors), world_size, list(ranks), backend, group_name, gloo_timeout)
    _check_ranks(actors, world_size, ranks)
    by_rank = [actor for _, actor in sorted(zip(ranks, actors), key=lambda pair: pair[0])]
    call = secrets.token_hex(8)
    joins = [actor.__ray_call__.remote(_join, world_size, rank, group_name, gloo_timeout, call) for rank, actor in enumerate(by_rank)]
    try:
        _wait_for_joins(joins, group_name, gloo_timeout / 1000 + _GRACE)
    except BaseException:
        _leave_all(by_rank, group_name, call)
        raise
    _remember(by_rank, group_name)


def declare_collective_group(actors: Sequence[Any], options: Optional[Mapping[str, Any]] = None, **more: Any) -> None:
    """The older name of `create_collective_group`: `declare_collective_group([A, B], {"group_name": "g", "world_size": 2, "ranks": [0, 1]})`.

    The options may be given as keywords, too. The defaults: all actors, their ranks in order, the backend "allstream", the name "default".
    """
    given: Dict[str, Any] = {**(options or {}), **more}
    if "rank" in given:
        given["ranks"] = given.pop("rank")
    given.setdefault("world_size", len(actors))
    given.setdefault("ranks", list(range(len(actors))))
    create_collective_group(actors, **given)


def destroy_collective_group(group_name: str = "default") -> None:
    """In an actor, calls Ray's function of this name. In the driver, makes all actors leave the group that this driver created.

    Raises:
        ValueError: this driver has created no such group.
    """
    if ray._private.worker.global_worker.mode == ray.WORKER_MODE:
        from ray.util.collective import destroy_collective_group as of_ray

        return of_ray(group_name)
    handle = _manager().remove_remote_communicator(group_name)
    if handle is None:
        raise ValueError(f"No group with name {group_name} found.")
    _leave_all(handle.actors, group_name)


destroy_group = destroy_collective_group


def _join(actor: Any, world_size: int, rank: int, group_name: str, gloo_timeout: int, call: str) -> None:
    """Runs in an actor: joins the group, and waits until all ranks have met."""
    register_here()
    from ray.util.collective import init_collective_group, is_group_initialized

    from allstream.ray.group import get_group

    if is_group_initialized(group_name):
        there = get_group(group_name)
        if (there.world_size, there.rank) != (world_size, rank):
            raise RuntimeError(there.says(f"Trying to initialize a group a second time, as rank {rank} of {world_size}."))
    else:
        init_collective_group(world_size, rank, BACKEND, group_name, gloo_timeout)
        get_group(group_name).made_by = call
    get_group(group_name).comm()


def _leave(actor: Any, group_name: str, call: Optional[str]) -> None:
    """Runs in an actor: leaves the group; with a `call`, only if that call of the driver made the group."""
    from ray.util.collective import destroy_collective_group as of_ray
    from ray.util.collective import is_group_initialized

    from allstream.ray.group import get_group

    if is_group_initialized(group_name) and (call is None or get_group(group_name).made_by == call):
        of_ray(group_name)


def _wait_for_joins(joins: List[Any], group_name: str, timeout: float) -> None:
    until = time.monotonic() + timeout
    waiting = {join: rank for rank, join in enumerate(joins)}
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, until - time.monotonic()))
        if not done:
            ranks = ", ".join(map(str, sorted(waiting.values())))
            raise errors.Rendezvous(
                f"group '{group_name}': the actors of rank {ranks} did not join within {timeout:g} s. Do they run (ray list actors), "
                "and are they done with what was called before?"
            )
        for join in done:
            rank = waiting.pop(join)
            try:
                ray.get(join)
            except ray.exceptions.RayActorError as error:
                raise errors.Rendezvous(f"group '{group_name}': the actor of rank {rank} died before it had joined: {error}") from error


def _leave_all(actors: Sequence[Any], group_name: str, call: Optional[str] = None) -> None:
    leaves = [actor.__ray_call__.remote(_leave, group_name, call) for actor in actors]
    # An actor that is busy for longer leaves when it comes to this call; one that is dead has left.
    ray.wait(leaves, num_returns=len(leaves), timeout=_GRACE)


def _check_ranks(actors: Sequence[Any], world_size: int, ranks: Sequence[int]) -> None:
    """The checks, and errors, of Ray's own function."""
    if len(ranks) != len(actors):
        raise RuntimeError(f"Each actor should correspond to one rank. Got '{len(ranks)}' ranks but '{len(actors)}' actors")
    if world_size <= 0:
        raise RuntimeError(f"World size must be greater than zero. Got '{world_size}'.")
    if world_size != len(actors):
        raise RuntimeError(f"World size must be the number of actors, {len(actors)}. Got '{world_size}'.")
    if set(ranks) != set(range(world_size)):
        raise RuntimeError(f"Ranks must be a permutation from 0 to '{world_size - 1}'. Got '{list(ranks)}'.")
    ids = [actor._ray_actor_id for actor in actors]
    if len(set(ids)) != len(ids):
        raise ValueError("All actors must be unique: one is there twice.")


def _manager() -> Any:
    from ray.experimental.collective.collective import RemoteCommunicatorManager

    return RemoteCommunicatorManager.get()


def _remember(actors: List[Any], group_name: str) -> None:
    """Makes the group known to this driver, for ObjectRefs and for `ray.experimental.collective`."""
    from ray.experimental.collective.communicator import CommunicatorHandle

    _manager().add_remote_communicator(CommunicatorHandle(actors, group_name, BACKEND))


class Gang:
    """Actors that were placed together, and form a group: `gang[rank]`, `len(gang)`, and iteration in order of rank."""

    def __init__(self, actors: List[Any], group_name: str, placement: Any) -> None:
        self.actors, self.group_name, self.placement_group = actors, group_name, placement

    def __len__(self) -> int:
        return len(self.actors)

    def __getitem__(self, rank: int) -> Any:
        return self.actors[rank]

    def __iter__(self) -> Any:
        return iter(self.actors)

    def shutdown(self) -> None:
        """Kills the actors, and removes their placement group."""
        _end(self.actors, self.placement_group)
        _manager().remove_remote_communicator(self.group_name)

    def __enter__(self) -> "Gang":
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()


def gang(
    actor_class: Any,
    world_size: int,
    args: Union[Sequence[Any], Callable[[int], Sequence[Any]]] = (),
    *,
    group_name: str = "default",
    resources: Optional[Mapping[str, float]] = None,
    strategy: str = "PACK",
    timeout: float = 30.0,
    gloo_timeout: int = 30_000,
    options: Optional[Mapping[str, Any]] = None,
) -> Gang:
    """Makes `world_size` actors in a placement group, and the group on them: all of them, or none.

    Args:
        actor_class: a class with `@ray.remote`.
        args: the arguments of its constructor, or a function that returns them for a rank.
        resources: what each actor needs, such as `{"CPU": 1, "GPU": 1}`; by default one CPU.
        strategy: the strategy of the placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        timeout: how many seconds to wait until all can be placed.
        gloo_timeout: as for `create_collective_group`.
        options: further options for `actor_class.options`.

    Raises:
        Unavailable: it says what could not be placed, and what the cluster has. No actor and no placement group is left.
        TimeoutError: the actors were placed, but did not meet in time.
    """
    if world_size <= 0:
        raise RuntimeError(f"World size must be greater than zero. Got '{world_size}'.")
    bundle = dict(resources or {"CPU": 1})
    placement = placement_group([dict(bundle) for _ in range(world_size)], strategy=strategy)
    actors: List[Any] = []
    try:
        if not placement.wait(timeout):
            raise errors.Unavailable(_not_placed(group_name, world_size, bundle, strategy, timeout))
        for rank in range(world_size):
            placed = actor_class.options(**{**_asked(bundle), **(options or {})}, scheduling_strategy=_place(placement, rank))
            actors.append(placed.remote(*(args(rank) if callable(args) else args)))
        create_collective_group(actors, world_size, range(world_size), BACKEND, group_name, gloo_timeout)
    except BaseException:
        _end(actors, placement)
        raise
    return Gang(actors, group_name, placement)


def _end(actors: Sequence[Any], placement: Any) -> None:
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(placement)


def _place(placement: Any, rank: int) -> Any:
    return PlacementGroupSchedulingStrategy(placement_group=placement, placement_group_bundle_index=rank)


def _asked(bundle: Mapping[str, float]) -> Dict[str, Any]:
    """The options with which an actor asks for the resources of a bundle."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    asked: Dict[str, Any] = {names[name]: amount for name, amount in bundle.items() if name in names}
    asked.setdefault("num_cpus", 0)
    others = {name: amount for name, amount in bundle.items() if name not in names}
    return {**asked, "resources": others} if others else asked


def _not_placed(group_name: str, world_size: int, bundle: Mapping[str, float], strategy: str, timeout: float) -> str:
    has, free = ray.cluster_resources(), ray.available_resources()
    needs = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    lacks = [
        f"{name}: {world_size * amount:g} needed in all, {has.get(name, 0):g} in the cluster, {free.get(name, 0):g} of them free"
        for name, amount in bundle.items()
    ]
    nodes = [
        f"{node['NodeManagerAddress']} has " + ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in bundle)
        for node in ray.nodes()
        if node["Alive"]
    ]
    return (
        f"group '{group_name}': {world_size} actors of {needs} each could not be placed together ({strategy}) within {timeout:g} s. "
        + "; ".join(lacks)
        + f". Nodes: {'; '.join(nodes)}. Ask for less, free what other actors hold, or add nodes."
    )
