//! How the tables of the collectives become the calls of a node: each device's part is the call of the same name.

/// A table of collectives. A row has documentation, a name, type parameters, and then:
/// - in parentheses the buffers of a rank, and behind `;` an argument that is the same on all ranks;
/// - `each(..)`: an argument that each rank gives for itself;
/// - `counts[..](..)`: lists that each rank gives for itself, each with a count for every rank;
/// - `root(..)`: the root;
/// - the types of what comes back on success and on failure, and what a [`Call`](crate::comm::Call) does.
///
/// A row becomes a row of [`calls`](crate::comm::calls::calls), and a method of `NodeCall` and of `Node` that takes for each device what the
/// row's call takes for a rank.
macro_rules! collectives {
    ($(
        $(#[$doc:meta])*
        fn $name:ident [$($generics:tt)*] ($($buf:ident: $held:ty),+ $(; $arg:ident: $ty:ty)?)
            $(each($own:ident: $own_ty:ty))? $(counts[$counts:ident]($($list:ident),+))? $(root($root:ident))?
            -> Work<$out:ty $(, $kept:ty)?> = |$call:ident| $body:expr;
    )*) => {
        $crate::comm::calls::calls! {
            $(
                $(#[$doc])*
                fn $name [$($generics)*] (
                    $($buf: $held),+ $(, $arg: $ty)? $(, $own: $own_ty)? $($(, $list: &[usize])+)? $(, $root: $crate::types::Rank)?
                ) -> Work<$out $(, $kept)?> = |$call| $body;
            )*
        }

        impl $crate::comm::NodeCall<'_> {
            $(
                #[doc = concat!("See [`Node::", stringify!($name), "`](crate::Node::", stringify!($name), ").")]
                #[allow(unused_parens, unused_variables, reason = "not every call has two buffers, lists and a root")]
                pub fn $name<S: $crate::comm::Several<Item = ($($held),+)>, $($generics)* $(, $counts: AsRef<[usize]>)?>(
                    &self, bufs: S $(, $arg: $ty)? $(, $own: &[$own_ty])? $($(, $list: &[$counts])+)? $(, $root: $crate::comm::Place)?
                ) -> $crate::comm::NodeWork<S, $out> {
                    let lists = &[$((stringify!($own), $own.len()))? $($((stringify!($list), $list.len())),+)?];
                    self.each(stringify!($name), bufs, (lists, None$(.or(Some($root)))?), |call, device, root, ($($buf),+)| {
                        $(let $root = root;)?
                        call.$name($($buf),+ $(, $arg)? $(, $own[device])? $($(, $list[device].as_ref())+)? $(, $root)?)
                    })
                }
            )*
        }

        $crate::comm::node::call::on_node! {
            $(
                #[doc = concat!(
                    "[`Comm::", stringify!($name), "`](crate::Comm::", stringify!($name), ") on all devices: `bufs` has the buffers \
                     of each device's call (an input and an output as a pair), and the results come back in the same shape. An argument \
                     that each rank gives of its own is a slice with one entry for each device."
                )]
                ///
                /// # Errors
                /// [`Failed`](crate::Failed) with each device's [`Outcomes`](crate::Outcomes): [`Error::Invalid`](crate::Error::Invalid)
                /// where an argument does not have one entry for each device, or one device's part cannot be carried out (then nothing was
                /// submitted, and all buffers come back); otherwise the errors of the call on [`Comm`](crate::Comm).
                #[allow(unused_parens, reason = "not every call has two buffers")]
                fn $name [S: $crate::comm::Several<Item = ($($held),+)>, $($generics)* $(, $counts: AsRef<[usize]>)?] (
                    bufs: S $(, $arg: $ty)? $(, $own: &[$own_ty])? $($(, $list: &[$counts])+)? $(, $root: $crate::comm::Place)?
                ) -> $crate::comm::NodeWork<S, $out>;
            )*
        }
    };
}

pub(in crate::comm) use collectives;
