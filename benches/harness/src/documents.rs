//! The documents that show records. README.md, benches/README.md and the plots show that of one GPU. The engine's
//! figures of other GPUs are in the READMEs of their records.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    Result, engine,
    plots::{self, ADAPTERS, MODEL},
    record::{self, FOLDERS, Record},
    report::{self, Table, geometric_mean},
    results::{Added, OthersFile, Results},
    selection::{Chosen, Subject},
    workload::{Suite, Workload},
};

/// The numbers of tokens that tables of layers have.
const LAYER_TOKENS: [usize; 6] = [1, 8, 64, 256, 512, 4096];
/// The largest of these that counts as decode.
const MAX_DECODE_TOKENS: usize = 256;

/// The files of the repository `root` that show `record`, with their paths in it and their new content.
pub fn of(root: &Path, record: &Record) -> Result<Vec<(PathBuf, String)>> {
    let chosen = Chosen::all()?;
    let read = |path: &str| fs::read_to_string(root.join(path));
    let readme = fill(&read("README.md")?, "summary", &summary(record, &chosen)?)?;
    let mut benches = read("benches/README.md")?;
    for (name, body) in blocks(record, &chosen) {
        benches = fill(&benches, name, &body)?;
    }
    benches = fill(&benches, "kernels", &kernels(record, &chosen))?;
    let engine = engine::Record::load(&root.join(&record.path))?;
    let shown = engine.as_ref().map_or_else(|| "Not measured.\n".to_owned(), |engine| engine.shown(&record.path));
    benches = fill(&benches, "engine", &shown)?;
    let mut files = vec![("README.md".into(), readme), ("benches/README.md".into(), benches)];
    for path in FOLDERS[1..].iter().map(|folder| record::path(folder)) {
        if let Some(engine) = engine::Record::load(&root.join(&path))? {
            let readme = format!("{path}/README.md");
            let shown = fill(&read(&readme)?, "engine", &engine.shown(&path))?;
            files.push((readme.into(), shown));
        }
    }
    let engine = engine.map(|engine| engine.plot(&record.path));
    for plot in plots::of(record, &chosen)?.into_iter().chain(engine) {
        files.push((Path::new("benches/plots").join(plot.file), plot.svg()?));
    }
    Ok(files)
}

/// Replaces what stands between `<!-- record: name -->` and `<!-- end -->`.
pub fn fill(text: &str, name: &str, body: &str) -> Result<String> {
    let begin = format!("<!-- record: {name} -->\n");
    let missing = || format!("there is no block {name}");
    let (before, rest) = text.split_once(&begin).ok_or_else(missing)?;
    let (_, after) = rest.split_once("<!-- end -->").ok_or_else(missing)?;
    Ok(format!("{before}{begin}{body}<!-- end -->{after}"))
}

/// Which workloads a row averages.
type IsIn = fn(Subject<'_>) -> bool;

/// Rows of README.md.
const SUMMARY: [(&str, IsIn); 5] = [
    ("decode, 1 to 16 tokens", |subject| subject.suite() == Suite::Decode && subject.num_tokens() <= 16),
    ("decode, 32 to 256 tokens", |subject| subject.suite() == Suite::Decode && subject.num_tokens() > 16),
    ("prefill, 512 to 8192 tokens", |subject| subject.suite() == Suite::Prefill),
    ("experts, 1 to 128 tokens", |subject| subject.suite() == Suite::Moe && subject.num_tokens() <= 128),
    ("experts, 1024 and 4096 tokens", |subject| subject.suite() == Suite::Moe && subject.num_tokens() > 128),
];

fn summary(record: &Record, chosen: &Chosen) -> Result<String> {
    let header = ["workloads", "n", "aril, µs", "floor, µs", "fastest other, µs", "other / aril", "other is faster in"];
    let mut table = Table::new(&header);
    let figures = record.figures(chosen);
    for (name, is_in) in SUMMARY {
        let rows = figures.iter().filter(|(subject, _)| is_in(*subject));
        let rows: Vec<_> =
            rows.map(|(_, of)| [Some(of.us), Some(of.floor_us), of.fastest.as_ref().map(|other| other.1)]).collect();
        table.row(row(name, &rows)?);
    }
    let rate = record.layer.rate()?;
    let in_layer =
        in_layer(record, chosen).into_iter().filter(|(workload, _)| workload.num_tokens() <= MAX_DECODE_TOKENS);
    let rows: Vec<_> = in_layer
        .map(|(workload, added)| {
            let with_gemm = |us: f64| added.gemm_us + us;
            let other = record.others.least_added(workload).map(|(_, us)| with_gemm(us));
            [added.least_us().map(with_gemm), Some(workload.bytes_with_base().floor_us(rate)), other]
        })
        .collect();
    table.row(row(&format!("base GEMM with LoRA, 1 to {MAX_DECODE_TOKENS} tokens"), &rows)?);
    Ok(format!(
        "{}\n{}",
        table.markdown(),
        source(
            record,
            &[("linear layers", &record.linear), ("experts", &record.moe), ("base GEMM with LoRA", &record.layer)],
        )
    ))
}

/// The means of ours, of floors, and of others where all have one.
fn row(name: &str, rows: &[[Option<f64>; 3]]) -> Result<Vec<String>> {
    let column = |i: usize| rows.iter().map(|row| row[i]).collect::<Option<Vec<f64>>>().filter(|of| !of.is_empty());
    let (Some(ours), Some(floors)) = (column(0), column(1)) else {
        return Err(format!("the record has no figures for: {name}").into());
    };
    let others = column(2);
    if ours.iter().chain(others.iter().flatten()).any(|us| *us <= 0.0) {
        return Err(format!("a figure for {name} is not positive").into());
    }
    let mut cells = vec![name.to_owned(), rows.len().to_string()];
    let us = geometric_mean(ours.iter().copied());
    cells.extend([us, geometric_mean(floors)].map(|us| format!("{us:.1}")));
    cells.extend(match others {
        Some(others) => {
            let faster = ours.iter().zip(&others).filter(|(ours, other)| other < ours).count();
            let other = geometric_mean(others);
            [format!("{other:.1}"), format!("{:.2}", other / us), faster.to_string()]
        }
        None => ["not measured", "", ""].map(str::to_owned),
    });
    Ok(cells)
}

/// The layers that documents show: those of up to as many adapters as the other libraries' have.
fn in_layer<'a>(record: &'a Record, chosen: &'a Chosen) -> Vec<(&'a Workload, &'a Added)> {
    let is_shown = |workload: &Workload| {
        workload.model == MODEL && LAYER_TOKENS.contains(&workload.num_tokens()) && workload.num_slots() <= ADAPTERS
    };
    record.added(chosen).into_iter().filter(|(workload, _)| is_shown(workload)).collect()
}

/// The blocks of benches/README.md.
fn blocks(record: &Record, chosen: &Chosen) -> [(&'static str, String); 6] {
    let figures = record.figures(chosen);
    let classes = |suites: &[Suite]| {
        let figures = figures.iter().filter(|(subject, _)| suites.contains(&subject.suite()));
        record::classes(figures.cloned().collect())
    };
    let linear = source(record, &[("", &record.linear)]);
    let moe = source(record, &[("", &record.moe)]);
    let layer = source(record, &[("", &record.layer)]);
    let block = |table: Table, source: &str| format!("{}\n{source}", table.markdown());
    [
        ("linear", block(classes(&[Suite::Decode, Suite::Prefill]), &linear)),
        ("own", block(classes(&[Suite::Own]), &linear)),
        ("host", block(record::host(&record.linear, chosen), &linear)),
        ("layer", block(report::added(&in_layer(record, chosen), &record.others), &layer)),
        ("experts", block(classes(&[Suite::Moe]), &moe)),
        ("own experts", block(classes(&[Suite::MoeOwn]), &moe)),
    ]
}

/// Chosen other kernels beside ours.
fn kernels(record: &Record, chosen: &Chosen) -> String {
    let Some(OthersFile { meta, dense, moe, .. }) = &record.kernels else { return "Not measured.\n".to_owned() };
    let [linear, experts] = [dense, moe].map(|entries| record::kernels(entries, chosen).markdown());
    format!("{linear}\n{experts}\nOne {}: {} (`{}`).\n", meta.gpu, meta.about, record.path)
}

/// The GPU, the commit and the folder of figures.
fn source(record: &Record, parts: &[(&str, &Results)]) -> String {
    let commits: Vec<&str> = parts.iter().map(|(_, part)| part.meta.commit()).collect();
    let commits = if commits.iter().all(|commit| *commit == commits[0]) {
        format!("commit {}", commits[0])
    } else {
        let parts = parts.iter().zip(commits).map(|((name, _), commit)| format!("{name} at commit {commit}"));
        parts.collect::<Vec<_>>().join(", ")
    };
    format!("One {}, {commits} (`{}`).\n", record.linear.meta.gpu, record.path)
}
