//! Compiles `csrc` with nvcc for the feature `cuda`.

#[cfg(feature = "cuda")]
#[path = "build/archs.rs"]
mod archs;
#[cfg(feature = "cuda")]
#[path = "build/runtime.rs"]
mod runtime;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-changed=csrc");
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    #[cfg(feature = "cuda")]
    if std::env::var_os("DOCS_RS").is_none() {
        kernels::compile();
    }
}

#[cfg(feature = "cuda")]
mod kernels {
    use std::{
        env, fs,
        path::{Path, PathBuf},
        process::Command,
    };

    /// The compiler, its headers and the static runtime, for machines without a CUDA toolkit.
    const WHEELS: &str = "nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl nvidia-nvvm";

    pub(super) fn compile() {
        for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "ARIL_CUDA_ARCHS", "ARIL_CUDART"] {
            println!("cargo:rerun-if-env-changed={variable}");
        }
        let Some(nvcc) = find_nvcc() else {
            println!(
                "cargo::error=the feature `cuda` needs nvcc 12.4 or newer, and found none. Install the CUDA toolkit,"
            );
            println!("cargo::error=or `pip install {WHEELS}`; or set NVCC.");
            return;
        };
        let runtime = super::runtime::library(
            env::var_os("ARIL_CUDART").map(|choice| choice.to_string_lossy().into_owned()).as_deref(),
        );
        let (flags, runtime) = match flags(&nvcc).and_then(|flags| Ok((flags, runtime?))) {
            Ok(both) => both,
            Err(error) => return println!("cargo::error={error}"),
        };
        let sources: Vec<PathBuf> = fs::read_dir("csrc")
            .expect("csrc is part of the package")
            .map(|entry| entry.expect("csrc is readable").path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
            .collect();
        // cc's own flags are for gcc and clang, and its CUDA mode asks for relocatable device code, which costs registers.
        let mut build = cc::Build::new();
        build
            .compiler(&nvcc)
            .no_default_flags(true)
            .warnings(false)
            .files(sources)
            .flags(["-O3", "-lineinfo"])
            .flags(&flags);
        // The last one spares users libstdc++: only the launches that nvcc writes for `<<<>>>`, of which there are none, have statics.
        for flag in ["-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"] {
            build.flag("-Xcompiler").flag(flag);
        }
        // Kernels assert what a wrong use of them would break (csrc/aril.h).
        if env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
            build.flag("-DARIL_DEBUG");
        }
        build.compile("aril_kernels");

        let root = nvcc.parent().and_then(Path::parent).expect("nvcc is in a toolkit's bin");
        for lib in ["lib64", "lib"].map(|name| root.join(name)) {
            if ["libcudart_static.a", "libcudart.so"].iter().any(|file| lib.join(file).exists()) {
                println!("cargo:rustc-link-search=native={}", lib.display());
            }
        }
        println!("cargo:rustc-link-lib={runtime}");
        for lib in ["rt", "dl", "pthread"] {
            println!("cargo:rustc-link-lib={lib}");
        }
        // For build scripts of dependants that have kernels of their own: DEP_ARIL_KERNELS_NVCC and DEP_ARIL_KERNELS_NVCC_FLAGS.
        let nvcc = std::path::absolute(nvcc).expect("the current directory exists");
        println!("cargo::metadata=nvcc={}", nvcc.display());
        println!("cargo::metadata=nvcc_flags={}", flags.join(" "));
    }

    /// nvcc's flags for the architectures of `ARIL_CUDA_ARCHS`, and those that the headers need.
    fn flags(nvcc: &Path) -> Result<Vec<String>, String> {
        let archs = match env::var("ARIL_CUDA_ARCHS") {
            Ok(archs) => archs,
            Err(_) => {
                let version = Command::new(nvcc).arg("--version").output();
                let version = version.map_err(|error| format!("{} does not run: {error}", nvcc.display()))?;
                super::archs::usual(&String::from_utf8_lossy(&version.stdout)).to_owned()
            }
        };
        let mut flags = vec!["-std=c++17".to_owned()];
        flags.extend(super::archs::gencodes(&archs)?);
        // A tenth of the bytes.
        flags.push("-Xfatbin=-compress-all".to_owned());
        Ok(flags)
    }

    fn find_nvcc() -> Option<PathBuf> {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let path: Vec<PathBuf> = variable("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default();
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).map(|home| home.join("bin"));
        let environments =
            variable("VIRTUAL_ENV").into_iter().chain(path.iter().filter_map(|bin| Some(bin.parent()?.to_owned())));
        let wheels: Vec<PathBuf> = environments.flat_map(|environment| wheel_toolkits(&environment)).collect();
        variable("NVCC")
            .into_iter()
            .chain(
                toolkits
                    .chain(path)
                    .chain([PathBuf::from("/usr/local/cuda/bin")])
                    .chain(wheels)
                    .map(|bin| bin.join("nvcc")),
            )
            .find(|nvcc| nvcc.is_file())
    }

    /// Where PyPI's wheels put the toolkit in a Python environment.
    fn wheel_toolkits(environment: &Path) -> Vec<PathBuf> {
        let children = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        children(environment.join("lib"))
            .flat_map(|python| children(python.join("site-packages/nvidia")))
            .map(|toolkit| toolkit.join("bin"))
            .collect()
    }
}
