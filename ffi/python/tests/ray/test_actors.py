"""Groups in the kinds of programs that Ray has: async actors, sub-groups, and a job whose workers have their own runtime environment."""

import numpy as np
import ray
from test_register import script

PATIENCE = 90


class Async:
    """An actor with an event loop, on which all its calls run concurrently."""

    def __init__(self, rank, name):
        import allstream.ray as col

        self.rank, self.name = rank, name
        for group in (f"{name}-a", f"{name}-b"):
            col.init_collective_group(2, rank, group_name=group)

    async def sum(self, group, value, count=1):
        """`count` all-reduces, one after the other."""
        import allstream.ray as col

        x = np.full(2, value)
        for _ in range(count):
            await col.allreduce_async(x, f"{self.name}-{group}")
        return x.tolist()

    async def leave(self):
        import allstream.ray as col

        for group in (f"{self.name}-a", f"{self.name}-b"):
            col.destroy_collective_group(group)


def test_async_actors_with_two_calls_at_once(cluster, name):
    """Each actor waits in both groups at once, and the two begin in different orders. Then each has two calls in one group at once."""
    actors = [ray.remote(num_cpus=0)(Async).remote(rank, name) for rank in range(2)]
    first = [actors[0].sum.remote("a", 1.0, 2), actors[0].sum.remote("b", 2.0)]
    second = [actors[1].sum.remote("b", 20.0), actors[1].sum.remote("a", 10.0, 2)]
    assert ray.get([*first, *second], timeout=PATIENCE) == [[22.0] * 2, [22.0] * 2, [22.0] * 2, [22.0] * 2]
    both = [actor.sum.remote("a", float(rank + 1)) for actor in actors for rank in (0, 1)]
    assert ray.get(both, timeout=PATIENCE) == [[2.0] * 2, [4.0] * 2] * 2
    ray.get([actor.leave.remote() for actor in actors], timeout=PATIENCE)
    for actor in actors:
        ray.kill(actor)


def halves(rank, name):
    """Splits the group into even and odd ranks, and uses this rank's half while the whole group is in use, too."""
    import allstream.ray as col

    half = col.get_group(name).comm().split(rank % 2, -rank)
    x, y = np.full(2, rank + 1.0), np.full(1, 1.0)
    work = half.all_reduce(x)
    col.allreduce(y, name)
    work.wait()
    found = half.rank, half.size, x.tolist(), y.tolist()
    half.close()
    return found


def test_sub_groups(pool, group):
    assert pool.all(halves, group) == [
        (1, 2, [4.0] * 2, [4.0]), (1, 2, [6.0] * 2, [4.0]), (0, 2, [4.0] * 2, [4.0]), (0, 2, [6.0] * 2, [4.0]),
    ]


def test_a_job_with_an_environment_of_its_own(tmp_path):
    """Workers run in a folder that Ray brings them, with the job's modules and environment variables; `register()` works beside that."""
    (tmp_path / "of_the_job.py").write_text(
        "import os\nimport allstream.ray as ar\nimport ray.util.collective as col\n"
        "def add(rank, name, x):\n"
        "    col.init_collective_group(2, rank, 'allstream', name)\n"
        "    x += float(os.environ['OF_THE_JOB'])\n"
        "    col.allreduce(x, name)\n"
        "    ar.destroy_group(name)\n"
        "    return x.tolist()\n"
    )
    done = script(f"""
        allstream.ray.register()
        ray.init(runtime_env={{"working_dir": {str(tmp_path)!r}, "env_vars": {{"OF_THE_JOB": "3"}}}}, **OPTIONS)
        def work(rank):
            import of_the_job
            return of_the_job.add(rank, "g", numpy.full(2, float(rank)))
        print(ray.get([actor.do.remote(work, rank) for rank, actor in enumerate(start())], timeout=90))
        print(ray.get([ray.remote(num_cpus=0)(work).remote(rank) for rank in range(2)], timeout=90))
    """)
    assert done.stdout.splitlines() == ["[[7.0, 7.0], [7.0, 7.0]]"] * 2, done.stderr[-3000:]
