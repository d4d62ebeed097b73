//! Numbers of a library's header, with their names there. They are no enums: a newer library may know more of them than this crate.

/// Makes a type for each kind of number, with a constant for each value, the method `name`, and `Debug`, which shows name and number.
macro_rules! numbers {
    ($($(#[$doc:meta])* $type:ident($of:ty) { $($value:literal $name:ident $symbol:ident;)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $type(pub $of);

        impl $type {
            $(#[doc = concat!("`", stringify!($symbol), "`")] pub const $name: $type = $type($value);)*

            /// All numbers of this kind that this crate knows, with their names in the header.
            #[cfg(test)]
            #[allow(dead_code)] // only some kinds are compared with a header
            pub(super) const NAMED: &'static [(&'static str, i64)] = &[$((stringify!($symbol), $value as i64)),*];

            /// The name in the library's header, if this crate knows the number.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($symbol)),)*
                    _ => None,
                }
            }
        }

        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.name() {
                    Some(name) => write!(f, "{name} ({})", self.0),
                    None => write!(f, "{} {}", stringify!($type), self.0),
                }
            }
        }
    )*};
}

pub(crate) use numbers;
