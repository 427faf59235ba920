//! Averages, tables, and the figures of other libraries.

use std::fs;

use aril_bench::{
    own::{launched, with_base},
    report::{Classes, Figures, Table, added, geometric_mean, host, median},
    results::{Added, Entry, HostCost, Others, WithBase, save},
    workload::Suite,
};

#[test]
fn averages() {
    assert!((median(&mut [3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
    assert!((median(&mut [4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
    assert!((geometric_mean([1.0, 4.0]) - 2.0).abs() < 1e-12);
}

#[test]
fn the_table_has_a_row_per_class_and_one_for_all() {
    let of = |id: &str, us, fastest: Option<(&str, f64)>| Figures {
        id: id.to_owned(),
        us,
        floor_us: 1.0,
        fused_us: None,
        write_us: None,
        fastest: fastest.map(|(name, us)| (name.to_owned(), us)),
        deltas: None,
    };
    let mut classes = Classes::default();
    classes.add(Suite::Prefill, "b".to_owned(), of("b1", 2.0, None));
    assert_eq!(classes.table().markdown().lines().next(), Some("| class | n | µs | floor, µs | times the floor |"));
    classes.add(Suite::Decode, "a".to_owned(), of("a1", 8.0, Some(("x", 16.0))));
    classes.add(Suite::Decode, "a".to_owned(), of("a2", 2.0, Some(("y", 1.0))));
    classes.add(Suite::Decode, "a".to_owned(), of("a3", 4.0, Some(("y", 4.0))));
    classes.add(Suite::Own, "ours".to_owned(), of("o", 3.0, None));
    let text = classes.table().markdown();
    let rows: Vec<&str> = text.lines().skip(2).collect();
    assert_eq!(rows[1], "| a | 3 | 4.00 | 1.00 | 4.00 | 4.00 | 1.00 | 0.50 | a2 | y 2, x 1 |");
    assert_eq!(rows[0], "| b | 1 | 2.00 | 1.00 | 2.00 |  |  |  |  |  |");
    assert_eq!(rows[2], "| ours | 1 | 3.00 | 1.00 | 3.00 |  |  |  |  |  |");
    assert_eq!(rows[3], "| all of workloads.json | 4 | 3.36 | 1.00 | 3.36 | 4.00 | 1.00 | 0.50 | a2 | y 2, x 1 |");
}

#[test]
fn those_that_only_write_deltas_have_columns_of_their_own() {
    let of = |id: &str, us, fastest, deltas| Figures {
        id: id.to_owned(),
        us,
        floor_us: 2.0,
        fused_us: None,
        write_us: Some(us / 2.0),
        fastest: Some(("x".to_owned(), fastest)),
        deltas: Some(("sglang_v2_moe".to_owned(), deltas)),
    };
    let mut classes = Classes::default();
    classes.add(Suite::Moe, "per_expert T<=32".to_owned(), of("a", 4.0, 16.0, 8.0));
    classes.add(Suite::Moe, "per_expert T<=32".to_owned(), of("b", 16.0, 16.0, 8.0));
    let own = Figures { write_us: None, fastest: None, deltas: None, ..of("c", 5.0, 0.0, 0.0) };
    classes.add(Suite::MoeOwn, "ours".to_owned(), own);
    let text = classes.table().markdown();
    let rows: Vec<&str> = text.lines().collect();
    assert!(
        rows[0].ends_with("| at | fastest others | deltas only, µs | deltas only/ours | worst | at |"),
        "{}",
        rows[0]
    );
    let figures = "2 | 8.00 | 2.00 | 4.00 | 4.00 | 16.00 | 2.00 | 1.00 | b | x 2 | 8.00 | 2.00 | 1.00 | b |";
    assert_eq!(rows[2], format!("| per_expert T<=32 | {figures}"));
    assert_eq!(rows[3], "| ours | 1 | 5.00 | 2.00 | 2.50 |  |  |  |  |  |  |  |  |  |  |");
    assert_eq!(rows[4], format!("| all of workloads.json | {figures}"));
}

#[test]
fn what_was_timed_with_activation_and_combine_has_a_column() {
    let of = |id: &str, us, fused_us| Figures {
        id: id.to_owned(),
        us,
        floor_us: 2.0,
        fused_us,
        write_us: None,
        fastest: None,
        deltas: None,
    };
    let mut classes = Classes::default();
    classes.add(Suite::MoeOwn, "ours".to_owned(), of("a", 4.0, Some(2.0)));
    classes.add(Suite::MoeOwn, "ours".to_owned(), of("b", 4.0, Some(8.0)));
    classes.add(Suite::Moe, "per_expert T<=32".to_owned(), of("c", 4.0, None));
    let text = classes.table().markdown();
    let rows: Vec<&str> = text.lines().collect();
    assert_eq!(rows[0], "| class | n | µs | floor, µs | times the floor | with activation and combine, µs |");
    assert_eq!(rows[2], "| ours | 2 | 4.00 | 2.00 | 2.00 | 4.00 |");
    assert_eq!(rows[3], "| per_expert T<=32 | 1 | 4.00 | 2.00 | 2.00 |  |");
}

#[test]
fn layers_have_a_table_with_what_lora_adds() {
    let workloads = with_base().unwrap();
    let of = |id: &str| workloads.iter().find(|workload| workload.id == id).unwrap();
    let (decode, prefill) = (of("layer/qwen3-8b/o/r16/t8/uniform8"), of("layer/qwen3-8b/down/r64/t8192/uniform8"));
    let added_us = |modes: &[(&str, f64)]| modes.iter().map(|&(mode, us)| (mode.to_owned(), us)).collect();
    let layers = [
        (decode, &Added { id: String::new(), gemm_us: 20.0, added_us: added_us(&[("after", 5.0)]) }),
        (prefill, &Added { id: String::new(), gemm_us: 400.0, added_us: added_us(&[("fused", -1.0)]) }),
    ];
    let text = added(&layers, &Others::default()).markdown();
    let rows: Vec<&str> = text.lines().collect();
    assert_eq!(rows[0], "| layer | T | rank | GEMM, µs | after, µs | after, % | fused, µs | fused, % |");
    assert_eq!(rows[2], "| qwen3-8b o | 8 | 16 | 20.0 | +5.0 | +25.0 |  |  |");
    assert_eq!(rows[3], "| qwen3-8b down | 8192 | 64 | 400.0 |  |  | -1.0 | -0.2 |");

    // Another library's is bold where it adds less.
    for (us, cell) in [(24.0, "**+4.0**"), (26.0, "+6.0")] {
        let mut others = Others::default();
        let times = format!(
            r#"[{{"id": "dec/qwen3-8b/o/r16/t8/distinct", "base_us": 20.0, "x_serial_us": 30.0, "x_overlap_us": {us},
                 "plan": "p"}},
                {{"id": "dec/qwen3-8b/o/r16/t16/uniform8", "base_us": 20.0, "x_serial_us": 20.5}}]"#
        );
        others.add_overlap(&serde_json::from_str::<Vec<WithBase>>(&times).unwrap()).unwrap();
        let text = added(&layers, &others).markdown();
        let rows: Vec<&str> = text.lines().collect();
        assert!(rows[0].ends_with("| fastest other, µs | which |"), "{}", rows[0]);
        assert_eq!(rows[2], format!("| qwen3-8b o | 8 | 16 | 20.0 | +5.0 | +25.0 |  |  | {cell} | x_overlap |"));
        assert!(rows[3].ends_with("| -1.0 | -0.2 |  |  |"), "{}", rows[3]);
    }
}

#[test]
fn the_host_has_a_table_with_targets() {
    let workloads = launched().unwrap();
    let cost = HostCost { id: String::new(), plan_us: 0.1, operands_us: 0.25, add_delta_us: 4.0 };
    let text = host(&[(&workloads[0], &cost)]).markdown();
    let rows: Vec<&str> = text.lines().skip(2).collect();
    assert_eq!(rows, ["| qwen3-8b qkv | 1 | 0.10 | 0.25 | 4.00 |", "| target, at most |  |  | 2 | 3 |"]);
    assert!(host(&[]).is_empty());
}

#[test]
fn tables_are_aligned() {
    let mut table = Table::new(&["name", "µs"]);
    table.row(vec!["longest".to_owned(), "10.5".to_owned()]);
    assert_eq!(table.to_string(), "name       µs\nlongest  10.5\n");
    assert_eq!(table.markdown(), "| name | µs |\n|---|---|\n| longest | 10.5 |\n");
}

#[test]
fn of_several_results_the_first_counts() {
    let entry = |id: &str, peer: &str, us| Entry {
        id: id.to_owned(),
        peer: peer.to_owned(),
        cold_us: Some(us),
        ..Entry::default()
    };
    let mut others = Others::default();
    others.add(vec![entry("w", "x", 5.0), entry("w", "aril", 1.0), entry("w", "torch_loop", 1.0)]);
    assert_eq!(others.fastest("w"), Some(("x".to_owned(), 5.0)));
    others.add(vec![entry("w", "x", 2.0), entry("w", "y", 4.0), entry("v", "x", 3.0)]);
    assert_eq!(others.fastest("w"), Some(("y".to_owned(), 4.0)));
    assert_eq!((others.fastest("v"), others.fastest("u")), (Some(("x".to_owned(), 3.0)), None));
    // What does less is a bar of its own.
    others.add(vec![entry("w", "sglang_v2_moe", 1.0), entry("u", "sglang_v2_moe", 2.0)]);
    assert_eq!((others.fastest("w"), others.fastest("u")), (Some(("y".to_owned(), 4.0)), None));
    assert_eq!(others.fastest_of_deltas("w"), Some(("sglang_v2_moe".to_owned(), 1.0)));
    assert_eq!(others.fastest_of_deltas("v"), None);
}

#[test]
fn others_are_reduced_to_the_fastest() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, gpu: &str, dense: &str, moe: &str, overlap: &str| {
        let path = dir.path().join(name);
        let meta = format!(r#"{{"gpu": "{gpu}", "cold_bytes": 1, "replays": 20, "seconds": {{"moe": 1.0}}}}"#);
        let text = format!(
            r#"{{"meta": {meta}, "dense": [{dense}], "moe": [{moe}], "overlap": [{overlap}], "failures": []}}"#
        );
        fs::write(&path, text).unwrap();
        path
    };
    let entry = |id: &str, peer: &str, us: f64| {
        format!(r#"{{"id": "{id}", "peer": "{peer}", "err": 0.001, "reps": 4, "cold_us": {us}}}"#)
    };
    let first = [entry("w", "x", 5.0), entry("w", "y", 4.0), entry("w", "aril", 1.0), entry("w", "torch_loop", 1.0)];
    let moe =
        [entry("m", "x", 9.0), entry("m", "sglang_v2_moe", 3.0), r#"{"id": "m", "peer": "z", "err": 0.1}"#.to_owned()];
    let overlap = |us: f64| format!(r#"{{"id": "dec/qwen3-8b/o/r16/t8/distinct", "base_us": 10.0, "x_us": {us}}}"#);
    let now = write("now.json", "G", &first.join(","), &moe.join(","), &overlap(12.0));
    let earlier =
        write("earlier.json", "G", &[entry("w", "y", 1.0), entry("w", "v", 3.0)].join(","), "", &overlap(11.0));
    let reduced = Others::reduced(&[&now, &earlier], "why").unwrap();
    assert_eq!((reduced.meta.gpu.as_str(), reduced.meta.about.as_str()), ("G", "why"));
    let of = |entries: &[Entry]| -> Vec<(String, f64, bool)> {
        entries.iter().map(|of| (format!("{} {}", of.id, of.peer), of.cold_us.unwrap(), of.note.is_some())).collect()
    };
    // The first file's y counts, and is slower than the second file's v.
    assert_eq!(of(&reduced.dense), [("w v".to_owned(), 3.0, true)]);
    assert_eq!(of(&reduced.moe), [("m x".to_owned(), 9.0, false), ("m sglang_v2_moe".to_owned(), 3.0, false)]);
    assert_eq!(reduced.overlap.iter().map(WithBase::least_added).collect::<Vec<_>>(), [Some(("x".to_owned(), 2.0))]);

    // What was reduced is read as what it was made of.
    let out = dir.path().join("others.json");
    save(&reduced, &out).unwrap();
    let others = Others::load(&[&out]).unwrap();
    assert_eq!(
        (others.fastest("w"), others.fastest_of_deltas("m")),
        (Some(("v".to_owned(), 3.0)), Some(("sglang_v2_moe".to_owned(), 3.0)))
    );
    let another = write("another.json", "H", "", "", "");
    let error = Others::reduced(&[&now, &another], "").unwrap_err().to_string();
    assert!(error.ends_with("another.json is of a H, not of a G"), "{error}");
}
