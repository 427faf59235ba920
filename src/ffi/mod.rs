//! The C ABI (`csrc/aril.h`) as Rust sees it: bindgen's output, committed, so that builds need no libclang.
//!
//! A test regenerates it (feature `bindgen`) and compares. The functions exist only where the feature `cuda` links them.

#[expect(dead_code, non_camel_case_types, unsafe_code, unreachable_pub, reason = "generated")]
#[rustfmt::skip]
mod bindings;

pub(crate) use bindings::*;

#[cfg(all(test, feature = "bindgen"))]
mod tests {
    /// `ARIL_BLESS=1` writes what bindgen made.
    #[test]
    fn bindings_are_those_of_the_header() {
        let generated = include_str!(concat!(env!("OUT_DIR"), "/bindings.rs"));
        if std::env::var_os("ARIL_BLESS").is_some() {
            std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/ffi/bindings.rs"), generated)
                .expect("the source can be written");
        }
        assert!(generated == include_str!("bindings.rs"), "csrc/aril.h has changed: run again with ARIL_BLESS=1");
    }
}
