//! Cutting a buffer into disjoint views, which operations own one by one, and joining them back.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{HostMemory, OwnedSlice, SliceOwner};
use crate::error::{Error, Failed};
use crate::types::DType;

/// A part of a buffer that can be owned by itself: what [`split`] and [`split_at`] make.
///
/// A [`HostMemory`], so an operation can own it while others own the other parts of the same buffer; derefs to its elements.
/// [`View::join`] gives the buffer back. The buffer lives as long as any of its views, and is dropped with the last,
/// on whichever thread that is.
///
/// A view's first element is aligned for its type, not more: where the owner's alignment matters (64 bytes, for a
/// [`HostBuf`](super::HostBuf)), cut at multiples of it.
pub type View<B> = OwnedSlice<<B as HostMemory>::Elem, Part<B>>;

/// What owns the memory of a [`View`]: a share of the buffer that was cut.
pub struct Part<B> {
    /// Where the view starts in the buffer, in elements.
    offset: usize,
    whole: Arc<Whole<B>>,
}

/// The buffer that was cut.
struct Whole<B> {
    /// How many elements it has.
    len: usize,
    is_pinned: bool,
    /// Locked once, to ask for the buffer's address; after that, nobody looks at the buffer until the last view is gone.
    /// The lock makes `Whole` `Sync` without `unsafe`.
    buf: Mutex<B>,
}

/// Cuts `buf` into consecutive views of these lengths, which may be 0 and add up to `buf.count()`.
///
/// Nothing is copied. The views come in order; each knows its [`offset`](View::offset).
///
/// ```
/// use allstream::{Comm, View, split};
/// # fn main() -> Result<(), allstream::Error> {
/// # let mut comm = Comm::local(1)?.remove(0);
/// let gradients = vec![1.0_f32; 1000];
/// let views = split(gradients, &[300, 0, 700])?;
/// let works: Vec<_> = views.into_iter().map(|view| comm.all_reduce(view)).collect(); // all in flight
/// let views = works.into_iter().map(|work| work.wait()).collect::<Result<Vec<_>, _>>()?;
/// let gradients: Vec<f32> = View::join(views)?;
/// # assert_eq!(gradients.len(), 1000); Ok(()) }
/// ```
///
/// # Errors
/// [`Failed`] with the buffer (always `Some`) and [`Error::Invalid`]: there are no lengths, they do not add up to
/// the buffer's, or the buffer is [`unfit`](HostMemory::unfit).
pub fn split<B: HostMemory>(buf: B, lens: &[usize]) -> Result<Vec<View<B>>, Failed<B>> {
    match buf.unfit().map(str::to_owned).or_else(|| misfit(lens, buf.count())) {
        None => Ok(View::whole(buf).cut(lens)),
        Some(problem) => Err(failed("split", problem, buf)),
    }
}

/// Cuts `buf` in two: the elements `0..mid`, and the others. Either may have none.
///
/// ```
/// # let mut comm = allstream::Comm::local(1)?.remove(0);
/// let [low, high] = allstream::split_at(vec![1.0_f32; 1000], 400)?;
/// let (first, second) = (comm.all_reduce(low), comm.all_reduce(high));
/// let sum: Vec<f32> = allstream::View::join([first.wait()?, second.wait()?])?;
/// # assert_eq!(sum.len(), 1000);
/// # Ok::<(), allstream::Error>(())
/// ```
///
/// # Errors
/// [`Failed`] with the buffer (always `Some`) and [`Error::Invalid`]: `mid` lies beyond the end, or the buffer is
/// [`unfit`](HostMemory::unfit).
pub fn split_at<B: HostMemory>(buf: B, mid: usize) -> Result<[View<B>; 2], Failed<B>> {
    match buf.unfit().map(str::to_owned).or_else(|| beyond(mid, buf.count())) {
        None => Ok(View::whole(buf).halve(mid)),
        Some(problem) => Err(failed("split_at", problem, buf)),
    }
}

fn failed<T>(call: &str, problem: String, buf: T) -> Failed<T> {
    Failed { buf: Some(buf), error: Error::invalid(call, problem) }
}

/// Why these lengths do not cut `len` elements, if they do not.
pub(crate) fn misfit(lens: &[usize], len: usize) -> Option<String> {
    if lens.is_empty() {
        return Some("no lengths were given, expected at least one".into());
    }
    match lens.iter().try_fold(0_usize, |sum, len| sum.checked_add(*len)) {
        Some(sum) if sum == len => None,
        Some(sum) => Some(format!("the lengths add up to {sum}, the buffer has {len} elements")),
        None => Some(format!("the lengths add up to more than any buffer has, this one has {len} elements")),
    }
}

pub(crate) fn beyond(mid: usize, len: usize) -> Option<String> {
    (mid > len).then(|| format!("cannot cut at {mid}, the buffer has {len} elements"))
}

impl<B: HostMemory> View<B> {
    /// The first view of a buffer: all of it.
    fn whole(buf: B) -> View<B> {
        let (len, is_pinned) = (buf.count(), buf.is_pinned());
        let whole = Arc::new(Whole { len, is_pinned, buf: Mutex::new(buf) });
        // Asked only now that the buffer lies where it stays: when a `Box` moves, pointers taken from it before become invalid.
        let start = whole.buf.lock().ptr_mut();
        // SAFETY: the buffer is a HostMemory: its elements are initialised, aligned, valid for reads and writes until it is dropped,
        // which the share keeps it from, and they do not move. Nobody else touches them: the buffer itself is not touched before the
        // last share is gone, and this is its only view (`halve` and `join` only hand on elements that views have).
        unsafe { OwnedSlice::new(start, len, Part { offset: 0, whole }) }
    }

    /// Hands this view out in pieces. The lengths add up to its own.
    fn cut(self, lens: &[usize]) -> Vec<View<B>> {
        let mut rest = self;
        let mut views = Vec::with_capacity(lens.len());
        for len in lens {
            let [view, behind] = rest.halve(*len);
            views.push(view);
            rest = behind;
        }
        views
    }

    /// Hands this view out in two pieces. `mid` is not beyond its end.
    fn halve(self, mid: usize) -> [View<B>; 2] {
        let (start, len, Part { offset, whole }) = self.into_parts();
        debug_assert!(mid <= len);
        let mid = mid.min(len);
        let view = |range: Range<usize>| {
            let part = Part { offset: offset + range.start, whole: whole.clone() };
            // SAFETY: what `View::whole` promised of all elements holds for those of this view that are in the range. This view is consumed,
            // the two ranges are disjoint, and views cannot be cloned, so no element is ever in two views.
            unsafe { OwnedSlice::new(start.add(range.start), range.len(), part) }
        };
        [view(0..mid), view(mid..len)]
    }

    /// Where this view starts in the buffer that was cut first, in elements.
    pub fn offset(&self) -> usize {
        self.owner().offset
    }

    /// Which elements this view holds of the buffer that was cut first.
    pub fn range(&self) -> Range<usize> {
        self.offset()..self.offset() + self.count()
    }

    /// Cuts this view further, as [`split`] does, but into views of the same buffer, not of this view.
    ///
    /// # Errors
    /// As [`split`], with this view.
    pub fn split(self, lens: &[usize]) -> Result<Vec<View<B>>, Failed<View<B>>> {
        match misfit(lens, self.count()) {
            None => Ok(self.cut(lens)),
            Some(problem) => Err(failed("View::split", problem, self)),
        }
    }

    /// Cuts this view in two, as [`split_at`] does, but into views of the same buffer, not of this view.
    ///
    /// # Errors
    /// As [`split_at`], with this view.
    pub fn split_at(self, mid: usize) -> Result<[View<B>; 2], Failed<View<B>>> {
        match beyond(mid, self.count()) {
            None => Ok(self.halve(mid)),
            Some(problem) => Err(failed("View::split_at", problem, self)),
        }
    }

    /// Gives the buffer back, for all of its views, in any order. Nothing is copied.
    ///
    /// A view that was dropped, or let go with its [`Work`](crate::Work), is missing for ever: the buffer is then
    /// dropped with the last of the other views.
    ///
    /// # Errors
    /// [`Failed`] with the views in the order given (always `Some`) and [`Error::Invalid`]: no views were given, they are
    /// of different buffers, or some are missing; the error says which elements are missing.
    pub fn join(views: impl IntoIterator<Item = View<B>>) -> Result<B, Failed<Vec<View<B>>>> {
        let views: Vec<View<B>> = views.into_iter().collect();
        let Some(first) = views.first() else {
            return Err(failed("View::join", "no views were given".into(), views));
        };
        if let Some(problem) = first.incomplete(&views) {
            return Err(failed("View::join", problem, views));
        }
        let whole = first.owner().whole.clone();
        let parts: Vec<_> = views.into_iter().map(|view| (view.range(), view.into_parts().0)).collect();
        match Arc::try_unwrap(whole) {
            Ok(whole) => Ok(whole.buf.into_inner()),
            Err(whole) => {
                // A view that was not given still has a share of the buffer, which therefore cannot be taken out. That view has no elements:
                // the given ones have them all.
                let back = |(range, start): (Range<usize>, _)| {
                    let part = Part { offset: range.start, whole: whole.clone() };
                    // SAFETY: the view as it was, which was consumed above.
                    unsafe { OwnedSlice::new(start, range.len(), part) }
                };
                let problem =
                    "all elements are here, but a view without elements is not: join it too, or drop it";
                Err(failed("View::join", problem.into(), parts.into_iter().map(back).collect()))
            }
        }
    }

    /// Why these views are not all of this view's buffer; `None`: they are.
    fn incomplete(&self, views: &[View<B>]) -> Option<String> {
        let whole = &self.owner().whole;
        if let Some(at) = views.iter().position(|view| !Arc::ptr_eq(&view.owner().whole, whole)) {
            return Some(format!("view {at} of those given is of another buffer than view 0"));
        }
        let mut ranges: Vec<_> = views.iter().map(View::range).collect();
        ranges.sort_unstable_by_key(|range| (range.start, range.end));
        let (len, gaps) = (whole.len, gaps(ranges, whole.len)?);
        Some(format!(
            "of the buffer's {len} elements {gaps} are in no view that was given: in operations in flight, or dropped"
        ))
    }
}

/// Which of `len` elements these ranges, which come in order, leave out; `None`: they leave out none.
pub(crate) fn gaps(ranges: impl IntoIterator<Item = Range<usize>>, len: usize) -> Option<String> {
    let (mut at, mut gaps) = (0, Vec::new());
    for range in ranges.into_iter().chain(std::iter::once(len..len)) {
        if range.start > at {
            gaps.push(format!("{at}..{}", range.start));
        }
        at = range.end;
    }
    (!gaps.is_empty()).then(|| gaps.join(", "))
}

impl<B: HostMemory> SliceOwner for Part<B> {
    fn describe(&self, dtype: DType, len: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View<{dtype}>({}..{} of {})", self.offset, self.offset + len, self.whole.len)
    }
    fn is_pinned(&self) -> bool {
        self.whole.is_pinned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::HostBuf;

    fn numbers(len: usize) -> Vec<u32> {
        (0..len as u32).collect()
    }

    #[test]
    fn views_are_disjoint_in_order_and_join_in_any_order_to_the_same_memory() {
        let buf = numbers(10);
        let at = buf.as_ptr();
        let mut views = split(buf, &[3, 0, 5, 2]).unwrap();
        assert_eq!(views.iter().map(View::offset).collect::<Vec<_>>(), [0, 3, 3, 8]);
        assert_eq!(*views[2], [3, 4, 5, 6, 7]);
        views[0][0] = 70;
        views[3][1] = 90;
        views.reverse();
        views.swap(0, 2);
        let back = View::join(views).unwrap();
        assert_eq!((back.as_ptr(), back.len()), (at, 10));
        assert_eq!(back, [70, 1, 2, 3, 4, 5, 6, 7, 8, 90]);
    }

    #[test]
    fn two_views_can_be_written_at_the_same_time() {
        let [mut low, mut high] = split_at(numbers(10).into_boxed_slice(), 4).unwrap();
        let (l, h) = (&mut *low, &mut *high);
        l.fill(1);
        h.fill(2);
        l[0] = h[0];
        let sent = std::thread::spawn(move || {
            high[5] = 3;
            high
        });
        low[1] = 5;
        let back = View::join([sent.join().unwrap(), low]).unwrap();
        assert_eq!(*back, [2, 5, 1, 1, 2, 2, 2, 2, 2, 3]);
    }

    #[test]
    fn a_view_is_cut_further_flat_or_as_any_buffer() {
        let [low, high] = split_at(HostBuf::from(&numbers(8)[..]), 2).unwrap();
        let mut views = high.split(&[1, 2, 3]).unwrap();
        assert_eq!(views.iter().map(View::range).collect::<Vec<_>>(), [2..3, 3..5, 5..8]);
        let [a, b] = views.remove(1).split_at(1).unwrap();
        // As any buffer: the views are then views of a view.
        let [mut c, d] = split_at(a, 1).unwrap();
        c[0] = 30;
        let a = View::join([d, c]).unwrap();
        let back: HostBuf<u32> = View::join(views.into_iter().chain([a, b, low])).unwrap();
        assert_eq!(*back, [0, 1, 2, 30, 4, 5, 6, 7]);
    }

    #[test]
    fn what_cannot_be_cut_is_given_back_with_the_reason() {
        let told = |lens: &[usize]| {
            let Failed { buf, error } = split(numbers(4), lens).unwrap_err();
            assert_eq!(buf, Some(numbers(4)));
            error.to_string()
        };
        assert_eq!(told(&[1, 2]), "split: the lengths add up to 3, the buffer has 4 elements");
        assert_eq!(told(&[]), "split: no lengths were given, expected at least one");
        let too_many = told(&[usize::MAX, 2, 3]);
        assert!(too_many.contains("more than any buffer has, this one has 4"), "{too_many}");
        let failed = split_at(numbers(4), 5).unwrap_err();
        assert_eq!(failed.error.to_string(), "split_at: cannot cut at 5, the buffer has 4 elements");
        let [_, view] = split_at(failed.buf.unwrap(), 1).unwrap();
        let failed = view.split(&[2]).unwrap_err();
        assert_eq!(*failed.buf.unwrap(), [1, 2, 3]);
        let empty: Vec<f32> = View::join(split(Vec::new(), &[0, 0]).unwrap()).unwrap();
        assert!(empty.is_empty());
    }

    #[test]
    fn an_incomplete_join_names_what_is_missing_and_gives_the_views_back() {
        let told = |views: Vec<View<Vec<u32>>>| {
            let count = views.len();
            let Failed { buf, error } = View::join(views).unwrap_err();
            let buf = buf.unwrap();
            assert_eq!(buf.len(), count);
            (buf, error.to_string())
        };
        let mut views = split(numbers(10), &[2, 3, 0, 4, 1]).unwrap();
        let (last, third) = (views.remove(3), views.remove(1));
        let (views, error) = told(views);
        assert!(error.contains("of the buffer's 10 elements 2..5, 5..9 are in no view"), "{error}");
        let (mut views, error) = told(views.into_iter().chain([third]).collect());
        assert!(error.contains("10 elements 5..9 are"), "{error}");
        let empty = views.remove(1);
        assert!(empty.is_empty());
        views.push(last);
        let (views, error) = told(views);
        assert!(error.contains("a view without elements is not"), "{error}");
        assert_eq!(views.iter().map(View::offset).collect::<Vec<_>>(), [0, 9, 2, 5]);
        let [other, _] = split_at(numbers(10), 10).unwrap();
        let (mut views, error) = told(views.into_iter().chain([other]).collect());
        assert!(error.contains("view 4 of those given is of another buffer"), "{error}");
        views.pop();
        drop(empty);
        assert_eq!(View::join(views).unwrap(), numbers(10));
        assert!(told(Vec::new()).1.contains("no views were given"));
    }
}
