//! One rank of two, which calls `all_reduce` twice: the program whose way from the second call to its first post `cargo xtask way` lists.

#![allow(missing_docs)]

use allstream::{Comm, Rendezvous, Work};

const LEN: usize = 1024;

/// The second call, apart from all else: what runs in here is counted.
#[inline(never)]
fn second_call(comm: &mut Comm, grads: Vec<f32>) -> Work<Vec<f32>> {
    comm.all_reduce(grads)
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        // Cargo, which runs benches as tests, names no rank.
        let Ok(there) = Rendezvous::from_env() else { return };
        let mut comm = Comm::connect(there).await.expect("the other rank comes");
        let grads = comm.all_reduce(vec![1f32; LEN]).await.expect("the first all_reduce");
        comm.barrier().await.expect("both are done with it");
        let grads = second_call(&mut comm, grads).await.expect("the second all_reduce");
        assert!(grads.iter().all(|x| *x == 4.0));
        comm.close().await.expect("the other rank closes, too");
    });
}
