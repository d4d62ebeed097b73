//! Methods by which all ranks of a group make something together: groups, meshes, the way to devices.

/// Methods of both handles, each of which takes several collectives: on `Comm` through `&mut self`, on `SharedComm` through `&self`. The
/// bodies are written for `SharedComm`. If several tasks of a rank call such methods on one communicator, they run one after another.
macro_rules! made_together {
    ($(
        $(#[$doc:meta])*
        async fn $name:ident [$($generics:tt)*] ($($arg:ident: $ty:ty),*) -> $out:ty = |$comm:ident| $body:expr;
    )*) => {
        impl $crate::comm::Comm {
            $(
                $(#[$doc])*
                pub async fn $name<$($generics)*>(&mut self, $($arg: $ty),*) -> $out {
                    self.share().$name($($arg),*).await
                }
            )*
        }

        impl $crate::comm::SharedComm {
            $(
                $(#[$doc])*
                pub async fn $name<$($generics)*>(&self, $($arg: $ty),*) -> $out {
                    let $comm = self;
                    let _turn = $comm.handle().making.lock().await;
                    $body.await
                }
            )*
        }
    };
}
pub(super) use made_together;
