//! [`Mesh`]: the ranks of a world as a grid, with a communicator along each axis.

use std::fmt;

use super::made_together::made_together;
use super::{Comm, SharedComm};
use crate::error::Error;
use crate::types::Rank;

/// Ranks laid out as a grid. For each axis there is a communicator of the ranks that differ from this rank along that axis alone.
///
/// Row-major, as torch's `DeviceMesh`: the last axis varies fastest. On `[("dp", 2), ("tp", 2)]` rank 1 has coordinates
/// dp 0, tp 1; `tp` joins 0 and 1, 2 and 3; `dp` joins 0 and 2, 1 and 3. A rank's coordinate along an axis is its rank
/// in that axis' communicator.
///
/// Made by [`Comm::mesh`].
pub struct Mesh {
    /// Of each axis: its name, this rank's coordinate, and its communicator.
    axes: Vec<(String, usize, Comm)>,
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axis = |(name, at, comm): &(String, usize, Comm)| format!("{name} {at} of {}", comm.size());
        write!(f, "Mesh({})", self.axes.iter().map(axis).collect::<Vec<_>>().join(", "))
    }
}

made_together! {
    /// Lays the ranks of this group out along named axes, `[("dp", 2), ("tp", 2)]`, and makes a communicator along each.
    /// Collective: all ranks of this group call it, with the same axes.
    ///
    /// # Errors
    /// [`Error::Invalid`] on all ranks if the product of the sizes is not the group's size, an axis is named twice, or ranks
    /// pass different axes; this communicator stays as it is. Otherwise the errors of [`split`](Comm::split).
    async fn mesh [N: Into<String>] (axes: impl IntoIterator<Item = (N, usize)>) -> Result<Mesh, Error>
        = |comm| comm.made_along(axes.into_iter().map(|(name, size)| (name.into(), size)).collect());
}

impl SharedComm {
    async fn made_along(&self, axes: Vec<(String, usize)>) -> Result<Mesh, Error> {
        let text = axes.iter().map(|(name, size)| format!("{name} {size}")).collect::<Vec<_>>().join(", ");
        let bytes = |name: &str| name.bytes().map(u64::from).chain([u64::MAX]).collect::<Vec<_>>();
        let words = axes.iter().flat_map(|(name, size)| bytes(name).into_iter().chain([*size as u64]));
        self.same("mesh", words, &format!("({text})"), problem(&axes, self.size())).await?;
        let (rank, mut made) = (self.rank(), Vec::new());
        let mut stride = self.size();
        for (name, size) in axes {
            let below = stride / size;
            let at = rank / below % size;
            // Ranks that differ along this axis alone give the same color: the rank of the one among them whose coordinate along the axis is 0.
            let color = rank - at * below;
            let comm = self.made_by_color(color as u64, at as i64).await?;
            made.push((name, at, comm));
            stride = below;
        }
        Ok(Mesh { axes: made })
    }
}

fn problem(axes: &[(String, usize)], n: usize) -> Option<String> {
    let twice =
        axes.iter().enumerate().find(|(i, (name, _))| axes[..*i].iter().any(|(other, _)| other == name));
    if let Some((_, (name, _))) = twice {
        return Some(format!("axis {name:?} is named twice"));
    }
    if axes.is_empty() {
        return Some(format!("no axes were named; their sizes must multiply to the group's {n} ranks"));
    }
    let product = axes.iter().try_fold(1usize, |product, (_, size)| product.checked_mul(*size));
    if product == Some(n) {
        return None;
    }
    let sizes = axes.iter().map(|(name, size)| format!("{name} {size}")).collect::<Vec<_>>().join(" x ");
    let product = product.map_or("too many to count".into(), |p| p.to_string());
    Some(format!("{sizes} is {product} ranks, and this group has {n}; the product of the sizes must be {n}"))
}

impl Mesh {
    fn find(&self, call: &str, axis: &str) -> Result<usize, Error> {
        self.axes.iter().position(|(name, ..)| name == axis).ok_or_else(|| {
            let names = self.names().collect::<Vec<_>>().join(", ");
            Error::invalid(call, format!("there is no axis {axis:?} in this mesh; its axes are {names}"))
        })
    }

    /// The communicator along an axis.
    ///
    /// # Errors
    /// [`Error::Invalid`] where no axis has that name.
    pub fn axis(&mut self, axis: &str) -> Result<&mut Comm, Error> {
        let at = self.find("axis", axis)?;
        Ok(&mut self.axes[at].2)
    }

    /// This rank's place along an axis, `0..size(axis)`: its rank in that axis' communicator.
    ///
    /// # Errors
    /// As of [`axis`](Self::axis).
    pub fn coordinate(&self, axis: &str) -> Result<Rank, Error> {
        Ok(self.axes[self.find("coordinate", axis)?].1)
    }

    /// How many ranks there are along an axis.
    ///
    /// # Errors
    /// As of [`axis`](Self::axis).
    pub fn size(&self, axis: &str) -> Result<usize, Error> {
        Ok(self.axes[self.find("size", axis)?].2.size())
    }

    /// The axes' names, slowest first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.axes.iter().map(|(name, ..)| name.as_str())
    }

    /// The axes' sizes, slowest first.
    pub fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(|(.., comm)| comm.size()).collect()
    }

    /// The communicators themselves, with their axes' names, slowest first.
    pub fn into_axes(self) -> Vec<(String, Comm)> {
        self.axes.into_iter().map(|(name, _, comm)| (name, comm)).collect()
    }

    /// Closes all communicators, in the order of the axes.
    ///
    /// # Errors
    /// The first error of [`Comm::close`]; all are closed.
    pub async fn close(self) -> Result<(), Error> {
        let mut end = Ok(());
        for (.., comm) in self.axes {
            end = end.and(comm.close().await);
        }
        end
    }
}
