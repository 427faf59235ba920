//! The links and the paths in the documents lead somewhere.

use std::{fs, path::Path};

use aril_bench::record::repository;

const DOCUMENTS: [&str; 13] = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "benches/README.md",
    "benches/record/designs.md",
    "benches/record/h100/README.md",
    "benches/record/h200/README.md",
    "crates/candle/README.md",
    "crates/serve/README.md",
    "examples/README.md",
    "examples/qwen3/README.md",
    "tests/fixtures/README.md",
];

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let mut count = 0;
    for document in DOCUMENTS {
        let path = repository().join(document);
        let text = fs::read_to_string(&path).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0)) {
            if link.contains("://") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(target.exists(), "{document} links to {link}, which is not there");
            assert!(
                heading.is_empty() || has_heading(&target, heading),
                "{document} links to {link}, which has no such heading"
            );
            count += 1;
        }
    }
    assert!(count > 20, "only {count} links were found");
}

/// The record of designs is left out: it names files of the history.
#[test]
fn every_path_is_there() {
    let mut count = 0;
    for document in ["CONTRIBUTING.md", "README.md", "benches/README.md", "examples/qwen3/README.md"] {
        let text = fs::read_to_string(repository().join(document)).unwrap();
        for path in text.split('`').skip(1).step_by(2) {
            let folders = ["src/", "csrc/", "tests/", "benches/", "crates/", "examples/", ".ci/"];
            if folders.iter().any(|folder| path.starts_with(folder)) && !path.contains(' ') {
                assert!(repository().join(path).exists(), "{document} names {path}, which is not there");
                count += 1;
            }
        }
    }
    assert!(count > 20, "only {count} paths were found");
}

/// Whether a heading of the file has this anchor: its words in lower case, joined by hyphens.
fn has_heading(file: &Path, anchor: &str) -> bool {
    let text = fs::read_to_string(file).unwrap();
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchors = headings.map(|line| line.trim_start_matches('#').trim().to_lowercase());
    let keep = |c: &char| c.is_alphanumeric() || [' ', '-', '_'].contains(c);
    anchors
        .map(|heading| heading.chars().filter(keep).collect::<String>().replace(' ', "-"))
        .any(|known| known == anchor)
}
