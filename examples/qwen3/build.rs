//! Compiles `kernels/kernels.cu` with the nvcc of aril's build script, for the same architectures.

use std::{env, error::Error, fs, path::Path, process::Command};

fn main() -> Result<(), Box<dyn Error>> {
    for source in ["kernels", "../../csrc/device", "../../csrc/ptx"] {
        println!("cargo::rerun-if-changed={source}");
    }
    let image = Path::new(&env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?).join("kernels.fatbin");
    // Neither is set without the feature `cuda`, or if aril was built without kernels for type-checking.
    let (Some(nvcc), Ok(flags)) = (env::var_os("DEP_ARIL_KERNELS_NVCC"), env::var("DEP_ARIL_KERNELS_NVCC_FLAGS"))
    else {
        return Ok(fs::write(image, [])?);
    };
    let status = Command::new(nvcc)
        .arg("-fatbin")
        .args(flags.split(' '))
        .arg("kernels/kernels.cu")
        .arg("-o")
        .arg(image)
        .status()?;
    if status.success() { Ok(()) } else { Err("nvcc could not compile kernels.cu".into()) }
}
