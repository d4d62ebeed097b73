//! [`functions`]: the functions of a foreign library, each as a row of a table.

/// Makes a `Table` of addresses, and a method of the library's type for each row `name(arguments) -> output = "symbol";`.
///
/// If a row has an output, the library's function takes a pointer to room for the output first, then the row's arguments. `(a: A, b: B)` among
/// these stands for two arguments of the function, which the method takes as one tuple. Each block of rows names a method of the library's
/// type, such as `check`, that turns an answer into a `Result`. A library without a `required` function does not load. The row of an `optional`
/// function names, after a slash, a method that says whether the library has the function. If it has not, a call of the function fails with the
/// error that the library's method `lacks` makes.
///
/// A function that does not answer with the library's result code has a row `name(arguments) => answer = "symbol";`: the block's method
/// turns that answer into a `Result`. Where symbols have versions, as those of libibverbs do, `@ "version"` behind the symbol says which
/// version is looked up.
macro_rules! functions {
    (
        $library:ident answers $code:ident, fails with $error:ident, is called: $safety:literal;
        $(required, $check:ident { $($(#[$doc:meta])* $name:ident $arguments:tt $(-> $out:ty)? $(=> $answer:ty)? = $symbol:literal $(@ $version:literal)?;)* })*
        $(optional, $ocheck:ident {
            $($(#[$odoc:meta])* $oname:ident / $has:ident $oarguments:tt $(-> $oout:ty)? $(=> $oanswer:ty)? = $osymbol:literal $(@ $oversion:literal)?;)*
        })?
    ) => {
        /// The addresses of the functions, looked up once.
        pub(super) struct Table {
            $($(pub(super) $name: functions!(@pointer $code $arguments $(-> $out)? $(=> $answer)?),)*)*
            $($($oname: Option<functions!(@pointer $code $oarguments $(-> $oout)? $(=> $oanswer)?)>,)*)?
        }

        impl Table {
            pub(super) fn load(library: &$crate::library::Library) -> Result<Table, $crate::library::Unavailable> {
                Ok(Table {
                    // SAFETY: the library exports this name as a function of this type, as its header says.
                    $($($name: unsafe { functions!(@find library, $symbol $(@ $version)?) }?,)*)*
                    // SAFETY: as above.
                    $($($oname: unsafe { functions!(@find library, $osymbol $(@ $oversion)?) }.ok(),)*)?
                })
            }
        }

        impl $library {
            $($(functions! {
                @method self $check(self.table.$name, $symbol, $error) $safety, "Every answer but success.";
                $(#[$doc])* $name $arguments $(-> $out)? $(=> $answer)?
            })*)*
            $($(
                functions! {
                    @method self $ocheck(self.table.$oname.ok_or_else(|| self.lacks($osymbol))?, $osymbol, $error)
                    $safety, "Every answer but success; that this library lacks the function.";
                    $(#[$odoc])* $oname $oarguments $(-> $oout)? $(=> $oanswer)?
                }

                #[doc = concat!("Whether this library has `", $osymbol, "`.")]
                pub fn $has(&self) -> bool {
                    self.table.$oname.is_some()
                }
            )*)?
        }
    };
    (@find $library:ident, $symbol:literal) => { $library.function($symbol) };
    (@find $library:ident, $symbol:literal @ $version:literal) => {
        $library.function_of_version($symbol, $version, concat!($symbol, "@", $version))
    };
    // `()` matches as one empty argument. The repetition is `+`, as with `*` the parser could also read `()` as no argument, which is ambiguous.
    (@pointer $code:ident ($($(($($part:ident: $kind:ty),*))? $($argument:ident: $type:ty)?),+) $(-> $out:ty)?) => {
        unsafe extern "C" fn($(*mut $out,)? $($($($kind,)*)? $($type,)?)+) -> $code
    };
    (@pointer $code:ident ($($(($($part:ident: $kind:ty),*))? $($argument:ident: $type:ty)?),+) => $answer:ty) => {
        unsafe extern "C" fn($($($($kind,)*)? $($type,)?)+) -> $answer
    };
    (
        @method $self:ident $check:ident($function:expr, $symbol:literal, $error:ident) $safety:literal, $errors:literal;
        $(#[$doc:meta])*
        $name:ident ($($(($($part:ident: $kind:ty),*))? $($argument:ident: $type:ty)?),+) $(-> $out:ty)?
    ) => {
        #[doc = concat!("`", $symbol, "`.")]
        $(#[$doc])*
        ///
        /// # Safety
        #[doc = $safety]
        ///
        /// # Errors
        #[doc = $errors]
        #[allow(unused_mut, unused_parens, clippy::too_many_arguments)]
        pub unsafe fn $name(
            &$self,
            $($(($($part),*): ($($kind),*))? $($argument: $type)?),+
        ) -> Result<($($out)?), $error> {
            let function = $function;
            let mut out = std::mem::MaybeUninit::<($($out)?)>::zeroed();
            // SAFETY: the caller keeps the library's contract for the arguments; `out` is room for the output.
            let code = unsafe { function($(out.as_mut_ptr() as *mut $out,)? $($($($part,)*)? $($argument,)?)+) };
            $self.$check($symbol, code)?;
            // SAFETY: `out` was zeroed, and outputs are numbers, addresses and arrays of bytes, for all of which zero is a value.
            Ok(unsafe { out.assume_init() })
        }
    };
    (
        @method $self:ident $check:ident($function:expr, $symbol:literal, $error:ident) $safety:literal, $errors:literal;
        $(#[$doc:meta])*
        $name:ident ($($(($($part:ident: $kind:ty),*))? $($argument:ident: $type:ty)?),+) => $answer:ty
    ) => {
        #[doc = concat!("`", $symbol, "`.")]
        $(#[$doc])*
        ///
        /// # Safety
        #[doc = $safety]
        ///
        /// # Errors
        #[doc = $errors]
        #[allow(unused_parens, clippy::too_many_arguments, clippy::unit_arg)]
        pub unsafe fn $name(
            &$self,
            $($(($($part),*): ($($kind),*))? $($argument: $type)?),+
        ) -> Result<$answer, $error> {
            let function = $function;
            // SAFETY: the caller keeps the library's contract for the arguments.
            $self.$check($symbol, unsafe { function($($($($part,)*)? $($argument,)?)+) })
        }
    };
}

pub(crate) use functions;
