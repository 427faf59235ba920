//! The Rust bindings of the C ABI.

use std::{error::Error, fs, path::Path};

use bindgen::callbacks::{DeriveInfo, ParseCallbacks};

/// Plans are values, that can be compared and begun from zeros.
#[derive(Debug)]
struct Plans;

impl ParseCallbacks for Plans {
    fn add_derives(&self, info: &DeriveInfo<'_>) -> Vec<String> {
        let is_plan = info.name.ends_with("_plan") || info.name.ends_with("_ring");
        if is_plan { ["Default", "Eq", "PartialEq"].map(str::to_owned).to_vec() } else { Vec::new() }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let header = root.join("csrc/aril.h");
    let generated = bindgen::builder()
        .header(header.to_str().ok_or("the path of csrc/aril.h is not UTF-8")?)
        .allowlist_item("(aril|ARIL)_.*")
        .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: false })
        .prepend_enum_name(false)
        .default_macro_constant_type(bindgen::MacroTypeVariation::Signed)
        .use_core()
        .layout_tests(false)
        .parse_callbacks(Box::new(Plans))
        .formatter(bindgen::Formatter::Prettyplease)
        .generate()?
        .to_string();
    let bindings = root.join("src/ffi/bindings.rs");
    if std::env::args().nth(1).is_some_and(|argument| argument == "--write") {
        fs::write(bindings, generated)?;
    } else if fs::read_to_string(bindings)? != generated {
        return Err("csrc/aril.h has changed: run this again with `-- --write`".into());
    }
    Ok(())
}
