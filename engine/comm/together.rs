//! Futures that run side by side in one task.

use std::future::{Future, poll_fn};
use std::task::Poll;

use crate::error::{Error, Failed};

/// Runs futures side by side until all are over, or until one gives a result for which `is_last` holds. Returns the results that
/// there are by then, in the order of the futures.
pub(crate) async fn until<T>(
    futures: impl IntoIterator<Item = impl Future<Output = T>>,
    is_last: impl Fn(&T) -> bool,
) -> Vec<T> {
    let mut all: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    poll_fn(|cx| {
        for (future, result) in all.iter_mut().filter(|(_, result)| result.is_none()) {
            if let Poll::Ready(done) = future.as_mut().poll(cx) {
                *result = Some(done);
            }
        }
        let results = || all.iter().map(|(_, result)| result.as_ref());
        let is_over = results().all(|result| result.is_some()) || results().flatten().any(&is_last);
        if is_over { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    all.into_iter().filter_map(|(_, result)| result).collect()
}

/// Runs futures side by side. Returns their results, in the order of the futures.
pub(crate) async fn together<T>(futures: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<T> {
    until(futures, |_| false).await
}

/// Runs futures side by side, each to its end, because peers depend on all of them. Returns all values, or the first error.
pub(crate) async fn all_of<T, A: FromIterator<T>>(
    futures: impl IntoIterator<Item = impl Future<Output = Result<T, Error>>>,
) -> Result<A, Error> {
    together(futures).await.into_iter().collect()
}

/// The first error, if there is one.
pub(crate) fn first_error<T, F>(results: &[Result<T, Failed<F>>]) -> Option<Error> {
    results.iter().find_map(|result| result.as_ref().err().map(|failed| failed.error.clone()))
}
