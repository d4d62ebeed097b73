//! One value for each device of a node: an array or a vector.

use smallvec::SmallVec;

/// One value for each device of a [`Node`](super::Node): `[T; K]` or `Vec<T>`. What comes back has the same shape:
/// `let [g0, g1] = node.all_reduce([g0, g1]).await?;`
///
/// Sealed: only these two types implement it.
pub trait Several: sealed::Several {
    /// The type of the value for each device.
    type Item;
    /// The same shape with values of another type.
    type Of<U>: Several<Item = U> + AsMut<[U]>;

    /// This value as an `Of<Item>`. That is this value's own type, but generic code cannot know so.
    #[doc(hidden)]
    fn items(self) -> Self::Of<Self::Item>;
    #[doc(hidden)]
    fn map<A, U>(all: Self::Of<A>, f: impl FnMut(A) -> U) -> Self::Of<U>;
    /// All values, if none is `None`.
    #[doc(hidden)]
    fn all<A>(all: Self::Of<Option<A>>) -> Option<Self::Of<A>>;
}

mod sealed {
    /// Nobody else can implement the trait, so a shape is an array or a vector.
    pub trait Several: Sized {}
    impl<T, const K: usize> Several for [T; K] {}
    impl<T> Several for Vec<T> {}
}

impl<T, const K: usize> Several for [T; K] {
    type Item = T;
    type Of<U> = [U; K];

    fn items(self) -> [T; K] {
        self
    }
    fn map<A, U>(all: [A; K], f: impl FnMut(A) -> U) -> [U; K] {
        all.map(f)
    }
    fn all<A>(all: [Option<A>; K]) -> Option<[A; K]> {
        // Collected on the stack, because a node's operations are to allocate nothing once the first few of them have run.
        all.into_iter().flatten().collect::<SmallVec<[A; K]>>().into_inner().ok()
    }
}

impl<T> Several for Vec<T> {
    type Item = T;
    type Of<U> = Vec<U>;

    fn items(self) -> Vec<T> {
        self
    }
    fn map<A, U>(all: Vec<A>, f: impl FnMut(A) -> U) -> Vec<U> {
        all.into_iter().map(f).collect()
    }
    fn all<A>(all: Vec<Option<A>>) -> Option<Vec<A>> {
        all.into_iter().collect()
    }
}
