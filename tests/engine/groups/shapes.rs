//! Groups as lists of ranks, as meshes, by name.

use allstream::{Backend, Comm, Error, Groups, Mesh};
use futures::executor::block_on;

use super::{LINKS, on_ranks, works};

fn gather(comm: &mut Comm, rank: usize) -> Vec<usize> {
    let ranks = comm.all_gather(vec![rank as u64]).wait().unwrap();
    ranks.into_iter().map(|r| r as usize).collect()
}

fn invalid<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Invalid { problem, .. }) => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_subset_is_those_ranks_in_that_order() {
    for link in LINKS {
        on_ranks(5, link, |rank, mut world| {
            for ranks in [vec![3, 0, 4], vec![2], vec![4, 3, 2, 1, 0], vec![3, 0, 4]] {
                let comm = block_on(world.subset(&ranks)).unwrap();
                assert_eq!(comm.is_some(), ranks.contains(&rank));
                if let Some(mut comm) = comm {
                    assert_eq!(ranks[comm.rank()], rank);
                    assert_eq!(gather(&mut comm, rank), ranks);
                }
            }
            works(&mut world);
        });
    }
}

#[test]
fn ranks_without_a_color_get_no_group() {
    on_ranks(4, "local", |rank, mut world| {
        let made = block_on(world.split_some((rank != 2).then_some(0), -(rank as i64))).unwrap();
        match made {
            None => assert_eq!(rank, 2),
            Some(mut comm) => assert_eq!(gather(&mut comm, rank), [3, 1, 0]),
        }
        // The highest color is a color.
        assert_eq!(block_on(world.split(u64::MAX, 0)).unwrap().size(), 4);
    });
}

#[test]
fn a_subset_that_cannot_be_is_an_error_on_all_ranks_and_harms_nothing() {
    on_ranks(3, "shm", |rank, mut world| {
        let error = invalid(block_on(world.subset(&[0, 3])));
        assert_eq!(error, "rank 3 is not in this group of 3; ranks are 0..=2");
        let error = invalid(block_on(world.subset(&[2, 1, 2])));
        assert_eq!(error, "rank 2 is named twice in [2, 1, 2]");
        assert!(invalid(block_on(world.subset(&[]))).contains("at least one"));
        // One rank alone is wrong: the others hear of it, and do not wait.
        let error = invalid(block_on(world.subset(if rank == 1 { &[0, 0] } else { &[0, 1] })));
        match rank {
            1 => assert_eq!(error, "rank 0 is named twice in [0, 0]"),
            _ => assert!(error.starts_with("rank 1 did not pass what rank"), "{error}"),
        }
        let error = invalid(block_on(world.subset(if rank == 2 { &[1, 0] } else { &[0, 1] })));
        assert!(error.contains("every rank must pass the same"), "{error}");
        works(&mut world);
        assert_eq!(world.stats().pool.live, 0);
    });
}

fn along(mesh: &mut Mesh, axis: &str, rank: usize) -> Vec<usize> {
    gather(mesh.axis(axis).unwrap(), rank)
}

#[test]
fn a_mesh_has_a_communicator_along_each_axis() {
    for link in LINKS {
        on_ranks(4, link, |rank, mut world| {
            let mut mesh = block_on(world.mesh([("dp", 2), ("tp", 2)])).unwrap();
            assert_eq!(mesh.coordinate("dp"), Ok(rank / 2));
            assert_eq!(mesh.coordinate("tp"), Ok(rank % 2));
            assert_eq!(along(&mut mesh, "dp", rank), [rank % 2, rank % 2 + 2]);
            assert_eq!(along(&mut mesh, "tp", rank), [rank / 2 * 2, rank / 2 * 2 + 1]);
            assert_eq!((mesh.size("dp"), mesh.shape()), (Ok(2), vec![2, 2]));
            assert_eq!(mesh.names().collect::<Vec<_>>(), ["dp", "tp"]);
            // Along one axis after the other: a sum over the whole world.
            let sum = mesh.axis("tp").unwrap().all_reduce(vec![rank as u32; 50_000]).wait().unwrap();
            let sum = mesh.axis("dp").unwrap().all_reduce(sum).wait().unwrap();
            assert_eq!(sum, vec![6; 50_000]);
            block_on(mesh.close()).unwrap();
            block_on(world.close()).unwrap();
        });
    }
}

#[test]
fn a_mesh_of_three_axes_is_row_major() {
    on_ranks(12, "local", |rank, mut world| {
        let mut mesh = block_on(world.mesh([("a", 2), ("b", 3), ("c", 2)])).unwrap();
        let at = ["a", "b", "c"].map(|axis| mesh.coordinate(axis).unwrap());
        assert_eq!(at, [rank / 6, rank / 2 % 3, rank % 2]);
        let place = |a: usize, b: usize, c: usize| 6 * a + 2 * b + c;
        let [a, b, c] = at;
        assert_eq!(along(&mut mesh, "a", rank), (0..2).map(|a| place(a, b, c)).collect::<Vec<_>>());
        assert_eq!(along(&mut mesh, "b", rank), (0..3).map(|b| place(a, b, c)).collect::<Vec<_>>());
        assert_eq!(along(&mut mesh, "c", rank), (0..2).map(|c| place(a, b, c)).collect::<Vec<_>>());
        for (name, comm) in mesh.into_axes() {
            assert_eq!(comm.rank(), at[["a", "b", "c"].iter().position(|n| *n == name).unwrap()]);
        }
    });
}

#[test]
fn a_mesh_that_does_not_fit_is_an_error_on_all_ranks_and_harms_nothing() {
    on_ranks(4, "local", |rank, mut world| {
        let error = invalid(block_on(world.mesh([("dp", 2), ("tp", 3)])));
        assert_eq!(error, "dp 2 x tp 3 is 6 ranks, and this group has 4; the product of the sizes must be 4");
        assert!(invalid(block_on(world.mesh([("dp", 4), ("tp", 0)]))).contains("is 0 ranks"));
        assert!(invalid(block_on(world.mesh([("x", 2), ("x", 2)]))).contains("\"x\" is named twice"));
        assert!(invalid(block_on(world.mesh::<String>([]))).contains("no axes were named"));
        let huge = [("a", usize::MAX), ("b", 16)];
        assert!(invalid(block_on(world.mesh(huge))).contains("too many to count"));
        let axes = if rank == 3 { [("tp", 2), ("dp", 2)] } else { [("dp", 2), ("tp", 2)] };
        assert!(invalid(block_on(world.mesh(axes))).contains("every rank must pass the same"));
        let mut mesh = block_on(world.mesh([("one", 1), ("all", 4)])).unwrap();
        let error = invalid(mesh.axis("dp").map(drop));
        assert_eq!(error, "there is no axis \"dp\" in this mesh; its axes are one, all");
        works(mesh.axis("all").unwrap());
        assert_eq!(along(&mut mesh, "one", rank), [rank]);
        works(&mut world);
    });
}

#[test]
fn groups_have_names() {
    on_ranks(3, "local", |rank, mut world| {
        let groups = Groups::new();
        assert!(!groups.is_initialized("pair") && groups.names().is_empty());
        if let Some(pair) = block_on(world.subset(&[2, 0])).unwrap() {
            groups.insert("pair", pair).unwrap();
        }
        groups.insert("all", block_on(world.dup()).unwrap()).unwrap();
        let place = [Some(1), None, Some(0)][rank];
        assert_eq!((groups.rank("pair"), groups.size("pair")), (place, place.map(|_| 2)));
        assert_eq!(groups.is_initialized("pair"), rank != 1);
        assert_eq!(groups.names(), if rank == 1 { vec!["all"] } else { vec!["all", "pair"] });
        assert_eq!((groups.rank("all"), groups.size("all")), (Some(rank), Some(3)));
        let all = groups.get("all").unwrap();
        assert_eq!(all.all_reduce(vec![1u8]).wait().unwrap(), [3]);
        drop(all);
        let error = invalid(groups.insert("all", block_on(world.dup()).unwrap()));
        assert!(error.contains("\"all\" is there already"), "{error}");
        assert!(groups.remove("all").is_some() && groups.remove("all").is_none());
        assert!(groups.get("all").is_none() && groups.rank("all").is_none());
        works(&mut world);
    });
}

#[test]
fn backends_say_what_is_there_and_why_not() {
    let all = allstream::backends();
    for status in &all {
        match status.backend {
            Backend::Link(_) => assert_eq!(status.available, Ok(())),
            // Available with a GPU, or with the driver for tests: cargo puts it where it has the tests look for libraries.
            Backend::Cuda if status.available.is_ok() => {}
            // Available with NCCL, which needs no GPU to be found.
            Backend::Nccl if status.available.is_ok() => {}
            // Available with an RDMA network card.
            Backend::Rdma if status.available.is_ok() => {}
            _ => {
                let error = status.available.clone().unwrap_err().to_string();
                let name = status.backend.to_string().to_uppercase();
                assert!(error.contains(&name) && error.contains("not available"), "{error}");
            }
        }
    }
    for name in ["inproc", "shm", "tcp", "cuda", "nccl", "rdma"] {
        assert!(all.iter().any(|status| status.backend.to_string() == name), "{name}");
    }
}

#[test]
fn a_mesh_made_again_is_the_idle_one() {
    on_ranks(4, "shm", |_, mut world: Comm| {
        for round in 0..3 {
            let mut mesh = block_on(world.mesh([("dp", 2), ("tp", 2)])).unwrap();
            works(mesh.axis("dp").unwrap());
            works(mesh.axis("tp").unwrap());
            drop(mesh);
            super::pool(&world, "both axes are idle", |p| p.idle == 2);
            world.barrier().wait().unwrap();
            assert_eq!(world.stats().pool.hits, 2 * round);
        }
    });
}
