//! The README says what the code does.

use aril::{
    DType,
    model::{MAX_RANK, MAX_SLICES},
    plan::{MAX_SLOTS, RouteCapacity},
};

const README: &str = include_str!("../README.md");
const MANIFEST: &str = include_str!("../Cargo.toml");

/// The architectures that `build.rs` compiles for unless it is told.
fn archs() -> &'static str {
    let default = include_str!("../build.rs").split_once(r#"env::var("ARIL_CUDA_ARCHS").unwrap_or_else(|_| ""#);
    let (archs, _) = default.and_then(|(_, rest)| rest.split_once('"')).expect("build.rs has default architectures");
    archs
}

#[test]
fn the_table_of_operations_is_that_of_the_code() {
    let dtypes = [DType::BF16, DType::F16, DType::F32].map(|dtype| dtype.to_string()).join(", ");
    let archs: Vec<String> = archs().split(';').map(|arch| format!("sm_{arch}")).collect();
    let archs = archs.join(", ");
    let max_experts = 1024;
    let checked = |num_experts| RouteCapacity::tokens(1).top_k(1).experts(num_experts).checked();
    assert!(checked(max_experts).is_ok() && checked(max_experts + 1).is_err());
    let operations = [
        (format!("linear, up to {MAX_SLICES} fused modules"), MAX_RANK, String::new()),
        ("embedding".to_owned(), MAX_RANK, String::new()),
        ("experts of a layer".to_owned(), MAX_RANK, format!(", {max_experts} experts")),
    ];
    for (operation, max_rank, limits) in operations {
        let row = format!(
            "| {operation} | yes | {archs}, PTX for later | {dtypes} | 1 to {max_rank} | {MAX_SLOTS} slots{limits} |"
        );
        assert!(README.lines().any(|line| line == row), "README.md must have the line\n{row}");
    }
}

#[test]
fn the_requirements_are_those_of_the_manifest() {
    let (_, rest) = MANIFEST.split_once("rust-version = \"").expect("Cargo.toml has a rust-version");
    let (version, _) = rest.split_once('"').expect("of a string");
    assert!(README.contains(&format!("- Rust {version}.")), "README.md must name Rust {version}");
    assert!(README.contains(&format!("by default `{}`", archs())), "README.md must name the default {}", archs());
}

#[test]
fn build_script_readme_and_ci_name_the_same_wheels() {
    let (_, rest) = include_str!("../build.rs").split_once("const WHEELS: &str = \"").expect("build.rs names wheels");
    let (wheels, _) = rest.split_once('"').expect("in a string");
    assert!(README.contains(&format!("`pip install {wheels}`")), "README.md must name {wheels}");
    assert!(include_str!("../.ci/run").contains(&format!("WHEELS=({wheels})")), ".ci/run must install {wheels}");
}

#[test]
fn every_feature_is_described() {
    let (_, rest) = MANIFEST.split_once("[features]").expect("Cargo.toml has features");
    let (features, _) = rest.split_once("\n[").expect("and more");
    let names = features.lines().filter_map(|line| line.split_once(" = ")).map(|(name, _)| name);
    for name in names.filter(|name| !name.starts_with('#') && *name != "default") {
        assert!(README.contains(&format!("| `{name}` |")), "README.md does not describe the feature {name}");
    }
}
