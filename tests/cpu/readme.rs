//! README.md agrees with the code.

use crate::archs::build::usual;
use aril::{
    DType,
    model::{Linear, MAX_RANK, MAX_SLICES, ModelSpec, Parallel, TpRank},
    plan::{Capacity, ForwardPlan, MAX_FORWARD_TOKENS, MAX_SLOTS, PlanError, RouteCapacity},
};

const README: &str = include_str!("../../README.md");
const MANIFEST: &str = include_str!("../../Cargo.toml");

/// The code with the set-up, which rustdoc compiles.
const LOOP: &str = include_str!("../../src/docs/loop.md");

/// The architectures that `build.rs` compiles for by default.
fn archs() -> &'static str {
    usual("release 13.0,")
}

#[test]
fn the_loop_is_that_of_the_documentation() {
    let (_, rest) = README.split_once("```rust,ignore\n").expect("README.md begins with the loop");
    let (code, _) = rest.split_once("```").expect("the block ends");
    let lines: Vec<_> = code.lines().map(|line| line.split_once("//").map_or(line, |(line, _)| line).trim()).collect();
    assert_eq!(lines.len(), 4, "{lines:?}");
    let mut rest = LOOP;
    for line in lines {
        let found = rest.split_once(line);
        (_, rest) =
            found.unwrap_or_else(|| panic!("src/docs/loop.md does not have, behind the others, the line {line}"));
    }
}

#[test]
fn the_table_of_operations_is_that_of_the_code() {
    let all = [DType::BF16, DType::F16, DType::F32];
    let names = |dtypes: &[DType]| dtypes.iter().map(DType::to_string).collect::<Vec<_>>().join(", ");
    let dtypes = names(&all);
    let archs: Vec<String> = archs().split(';').map(|arch| format!("sm_{arch}")).collect();
    let max_experts = 1024;
    let checked = |num_experts| RouteCapacity::tokens(1).top_k(1).experts(num_experts).checked();
    assert!(checked(max_experts).is_ok() && checked(max_experts + 1).is_err());
    let is_fused = |dtype: &DType| fused(*dtype).is_ok();
    let fused_dtypes = names(&all.into_iter().filter(is_fused).collect::<Vec<_>>());
    // After "sm_": one or two digits of the major version, one of the minor, and perhaps a letter.
    let is_new = |arch: &&String| {
        let number: i32 = arch[3..].trim_end_matches(['a', 'f']).parse().expect("an architecture is a number");
        ForwardPlan::is_for((number / 10, number % 10))
    };
    let new_archs: Vec<String> = archs.iter().filter(is_new).cloned().collect();
    let [archs, new_archs] = [archs, new_archs].map(|archs| archs.join(", "));
    let operations = [
        (format!("linear, up to {MAX_SLICES} fused modules"), &archs, &dtypes, String::new()),
        (
            "linear with its base weights, in one launch".to_owned(),
            &new_archs,
            &fused_dtypes,
            format!(", {MAX_FORWARD_TOKENS} tokens"),
        ),
        ("embedding".to_owned(), &archs, &dtypes, String::new()),
        ("experts of a layer".to_owned(), &archs, &dtypes, format!(", {max_experts} experts")),
    ];
    for (operation, archs, dtypes, limits) in operations {
        let row = format!(
            "| {operation} | yes | {archs}, PTX for newer GPUs | {dtypes} | 1 to {MAX_RANK} | {MAX_SLOTS} \
             slots{limits} |"
        );
        assert!(README.lines().any(|line| line == row), "README.md must have the line\n{row}");
    }
}

/// A plan of the fused linear.
fn fused(dtype: DType) -> Result<ForwardPlan, PlanError> {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("m", Parallel::Replicated, 8).slice("q", 8)).expect("the layer is described once");
    let model = spec.shard(TpRank::SINGLE).expect("one rank has all of it");
    ForwardPlan::new(&model[id], dtype, Capacity::tokens(1).slots(1).rank(MAX_RANK))
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
    let (_, rest) =
        include_str!("../../build.rs").split_once("const WHEELS: &str = \"").expect("build.rs names wheels");
    let (wheels, _) = rest.split_once('"').expect("in a string");
    assert!(README.contains(&format!("`pip install {wheels}`")), "README.md must name {wheels}");
    assert!(include_str!("../../.ci/run").contains(&format!("WHEELS=({wheels})")), ".ci/run must install {wheels}");
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
