//! RDMA on this host, near the addresses at which other ranks reach it.

use super::addresses;
use crate::error::Error;
use crate::link::verbs::{Rdma, choose, read, wishes::Wishes};

/// Finds out which ports of which network cards could carry links to other hosts by RDMA, and why others could not: InfiniBand and RoCE v2, through
/// libibverbs, which is loaded when this is first called. **There is no such link yet**: between hosts collectives go over TCP.
///
/// Of a port's addresses (GIDs) on Ethernet one of RoCE v2 is taken, if there are several one of the interface at which the other ranks reach this
/// host, and of those one of IPv4 before one of IPv6. `ALLSTREAM_RDMA_DEVICE` (`mlx5_0`, `mlx5_0,mlx5_1:1`, `^mlx5_2`) and `ALLSTREAM_RDMA_GID` (an
/// index) choose otherwise; `ALLSTREAM_VERBS_LIBRARY` names the library's file.
///
/// ```
/// match allstream::rdma::find() {
///     Ok(rdma) => rdma.ports.iter().for_each(|port| println!("{port}")),
///     Err(error) => println!("{error}"), // what is missing, and what to do
/// }
/// ```
///
/// # Errors
/// [`Error::Unavailable`]: there is no library, no device, or no port that can be used; or this process may lock too little memory.
/// [`Error::Invalid`]: a variable says what cannot be understood.
pub fn find() -> Result<Rdma, Error> {
    let get = |name: &str| std::env::var(name).ok();
    let wishes =
        Wishes::from_lookup(get).map_err(|problem| Error::invalid("read the environment", problem))?;
    let verbs = read::library()?;
    let facts = read::facts(verbs)?;
    let near = addresses::reached_at()?;
    let chosen = choose::choose(verbs.file(), &facts, &wishes, &near);
    chosen.map_err(|problem| Error::Unavailable { what: "RDMA".into(), problem })
}
