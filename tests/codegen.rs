//! The compiled kernels: registers and local memory within the budget, no symbols that could clash, 16-byte loads.
//!
//! Ignored by default, because not every machine has nvcc: `NVCC=… cargo test --test codegen -- --include-ignored`. The
//! registers of every kernel, and its bytes of local memory, are in `codegen.budget`, a column for each architecture;
//! `ARIL_BLESS=1` writes it, and the diff is for review.
#![allow(clippy::panic, clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use rayon::prelude::*;

const ARCHS: [&str; 4] = ["80", "90a", "100f", "120f"];
/// Those of them that are compiled: all, or the ones in `ARIL_BUDGET_ARCHS`, such as `90a;120f`.
fn compiled_archs() -> Vec<&'static str> {
    let listed = env::var("ARIL_BUDGET_ARCHS").ok();
    let is_listed = |arch: &&str| listed.as_ref().is_none_or(|listed| listed.split(';').any(|of| of == *arch));
    ARCHS.into_iter().filter(is_listed).collect()
}

const BUDGET: &str = "tests/codegen.budget";

/// The output of `ptxas -v`.
#[derive(Debug, Default, Eq, PartialEq)]
struct Report {
    /// By architecture and name; kernels only.
    registers: BTreeMap<(String, String), u32>,
    /// Bytes of the stack frame, by architecture and name; only functions with a stack or spills.
    local_bytes: BTreeMap<(String, String), u32>,
}

impl Report {
    fn parse(text: &str) -> Self {
        let (mut report, mut arch, mut kernel, mut function) = (Self::default(), "", "", "");
        for line in text.lines() {
            let line = line.strip_prefix("ptxas info    : ").unwrap_or(line).trim();
            if let Some(rest) = line.strip_prefix("Compiling entry function '") {
                (kernel, arch) = rest.trim_end_matches('\'').split_once("' for '").unwrap();
            } else if let Some(name) = line.strip_prefix("Function properties for ") {
                function = name;
            } else if line.contains("bytes stack frame") {
                if line.split(", ").any(|part| !part.starts_with("0 bytes")) {
                    let bytes = line.split(' ').next().unwrap().parse().unwrap();
                    report.local_bytes.insert((arch.to_owned(), function.to_owned()), bytes);
                }
            } else if let Some(rest) = line.strip_prefix("Used ") {
                let registers = rest.split(' ').next().unwrap().parse().unwrap();
                report.registers.insert((arch.to_owned(), kernel.to_owned()), registers);
            }
        }
        report
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed:\n{text}");
    text
}

fn sources() -> Vec<PathBuf> {
    let mut sources: Vec<PathBuf> = fs::read_dir("csrc").unwrap().map(|entry| entry.unwrap().path()).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "cu"));
    sources.sort();
    sources
}

/// Compiles as build.rs does, for all architectures, and returns nvcc's output.
fn compile(source: &Path, object: &Path) -> String {
    let nvcc = env::var_os("NVCC").unwrap_or_else(|| "nvcc".into());
    let host = "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti";
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v,--warn-on-spills", "-Xcompiler", host]);
    command.args(compiled_archs().iter().map(|arch| format!("-gencode=arch=compute_{arch},code=sm_{arch}")));
    run(command.arg("-c").arg(source).arg("-o").arg(object))
}

/// The objects and nvcc's output for each; compiled once.
fn compiled() -> &'static [(PathBuf, String)] {
    static COMPILED: OnceLock<Vec<(PathBuf, String)>> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let object = |source: &Path| dir.join(source.with_extension("o").file_name().unwrap());
        sources().into_par_iter().map(|source| (object(&source), compile(&source, &object(&source)))).collect()
    })
}

/// A demangled name without return type and parameters.
fn demangle(name: &str) -> String {
    let name = run(Command::new("c++filt").arg("-p").arg(name));
    let name = name.trim().replace("(anonymous namespace)::", "");
    name.strip_prefix("void ").unwrap_or(&name).to_owned()
}

/// Registers and bytes of local memory of each kernel, by architecture.
type Used = BTreeMap<String, [(u32, u32); ARCHS.len()]>;

/// A line is `registers/bytes` for each architecture, and the kernel.
fn budget() -> Used {
    let parse = |line: &str| {
        let mut columns = line.splitn(ARCHS.len() + 1, ' ');
        let used = ARCHS.map(|_| {
            let (registers, local_bytes) = columns.next().unwrap().split_once('/').unwrap();
            (registers.parse().unwrap(), local_bytes.parse().unwrap())
        });
        (columns.next().unwrap().to_owned(), used)
    };
    fs::read_to_string(BUDGET).unwrap().lines().map(parse).collect()
}

#[test]
#[ignore = "needs nvcc and binutils"]
fn kernels_keep_to_their_registers() {
    let mut used = Used::new();
    for (_, text) in compiled() {
        let mut report = Report::parse(text);
        for (key, registers) in report.registers {
            let local_bytes = report.local_bytes.remove(&key).unwrap_or(0);
            let (arch, kernel) = key;
            let column = ARCHS.iter().position(|of| arch.strip_prefix("sm_") == Some(of)).unwrap();
            used.entry(demangle(&kernel)).or_default()[column] = (registers, local_bytes);
        }
        assert_eq!(report.local_bytes, BTreeMap::new(), "functions that are not inlined have no local memory");
    }
    let archs = compiled_archs();
    if env::var_os("ARIL_BLESS").is_some() {
        assert_eq!(archs, ARCHS, "{BUDGET} is written for all architectures at once");
        let line = |(kernel, used): (&String, &[(u32, u32); ARCHS.len()])| {
            let columns = used.map(|(registers, local_bytes)| format!("{registers}/{local_bytes} "));
            format!("{}{kernel}\n", columns.concat())
        };
        fs::write(BUDGET, used.iter().map(line).collect::<String>()).unwrap();
    }
    let mut budget = budget();
    for (kernel, used) in &used {
        let most = budget.remove(kernel).unwrap_or_else(|| panic!("{BUDGET} has no {kernel}"));
        for ((arch, used), most) in ARCHS.iter().zip(used).zip(most).filter(|((arch, _), _)| archs.contains(*arch)) {
            assert!(used.0 > 0, "there is no {kernel} for {arch}");
            let within = used.0 <= most.0 && used.1 <= most.1;
            assert!(within, "{kernel} for {arch} uses registers and bytes of local memory {used:?}, and has {most:?}");
        }
    }
    assert!(budget.is_empty(), "{BUDGET} names kernels that are gone: {budget:?}");
}

#[test]
#[ignore = "needs nvcc and binutils"]
fn nothing_but_the_abi_is_exported() {
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("all.so");
    let objects = compiled().iter().map(|(object, _)| object);
    run(Command::new("c++").arg("-shared").args(objects).arg("-o").arg(&library));
    for symbol in run(Command::new("nm").args(["--defined-only", "-D"]).arg(&library)).lines() {
        let name = symbol.split_whitespace().next_back().unwrap();
        assert!(name.starts_with("aril_"), "{name} is visible to whom the library is linked with");
    }
}

#[test]
#[ignore = "needs nvcc, binutils and CUOBJDUMP"]
fn sass_has_wide_loads_and_no_local_memory() {
    let budget = budget();
    let is_spilled = |name: &str| budget.get(name).is_some_and(|most| most.iter().any(|most| most.1 > 0));
    let cuobjdump = env::var_os("CUOBJDUMP").expect("CUOBJDUMP names cuobjdump; it is in the CUDA toolkit");
    for (object, _) in compiled() {
        let sass = run(Command::new(&cuobjdump).arg("-sass").arg(object));
        for function in sass.split("Function : ").skip(1) {
            let name = demangle(function.lines().next().unwrap().trim());
            let has = |instruction: &str| function.lines().any(|line| line.contains(instruction));
            let local = if is_spilled(&name) { [].as_slice() } else { &[" LDL", " STL"] };
            for forbidden in local.iter().chain(&["vprintf", "malloc"]) {
                assert!(!has(forbidden), "{name} has{forbidden}");
            }
            // Kernels in f32 are not built for speed.
            if (name.contains("shrink") || name.contains("expand")) && !name.contains("f32") {
                assert!(
                    has("LDG.E.128") || has("LDGSTS.E") || has("UBLKCP"),
                    "{name} loads less than 16 bytes at once"
                );
            }
        }
    }
}

#[test]
fn reports_are_read() {
    let text = "ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'good' for 'sm_80'
ptxas info    : Function properties for good
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 464 bytes cmem[0]
ptxas info    : Compiling entry function 'bad' for 'sm_90a'
ptxas info    : Function properties for bad
    8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers
";
    let report = Report::parse(text);
    let registers = [(("sm_80", "good"), 40), (("sm_90a", "bad"), 255)];
    let registers = registers.map(|((arch, kernel), used)| ((arch.to_owned(), kernel.to_owned()), used));
    assert_eq!(report.registers, BTreeMap::from(registers));
    assert_eq!(report.local_bytes, BTreeMap::from([(("sm_90a".to_owned(), "bad".to_owned()), 8)]));
}
