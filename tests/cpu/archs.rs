//! The build script's reading of `ARIL_CUDA_ARCHS` and `ARIL_CUDART`.

#[path = "../../build/archs.rs"]
pub(super) mod build;
#[path = "../../build/runtime.rs"]
mod runtime;

use build::{gencodes, usual};

/// The architectures that code is compiled for, and that of the PTX.
fn targets(archs: &str) -> (Vec<String>, String) {
    let mut flags = gencodes(archs).unwrap();
    let ptx = flags.pop().unwrap();
    let newest = ptx.strip_prefix("-gencode=arch=compute_").and_then(|rest| rest.split_once(",code=compute_")).unwrap();
    assert_eq!(newest.0, newest.1);
    let target = |flag: &String| {
        let (virtual_arch, code) =
            flag.strip_prefix("-gencode=arch=compute_").and_then(|rest| rest.split_once(",code=sm_")).unwrap();
        assert_eq!(virtual_arch, code);
        code.to_owned()
    };
    (flags.iter().map(target).collect(), newest.0.to_owned())
}

#[test]
fn each_architecture_has_code_and_the_newest_has_ptx() {
    for (archs, code, ptx) in [
        ("80;90a", &["80", "90a"][..], "90"),
        ("90a", &["90a"], "90"),
        ("100a", &["100a"], "100"),
        ("100f", &["100f"], "100"),
        ("120f", &["120f"], "120"),
        ("120f;90a, 100f", &["120f", "90a", "100f"], "120"),
        (" 80 ,86;; 103a ;", &["80", "86", "103a"], "103"),
    ] {
        let (found, newest) = targets(archs);
        assert_eq!(
            (&found[..], &newest[..]),
            (&code.iter().map(|arch| (*arch).to_owned()).collect::<Vec<_>>()[..], ptx)
        );
    }
}

#[test]
fn the_usual_architectures_are_those_that_nvcc_has() {
    for (version, archs) in [
        ("Cuda compilation tools, release 12.4, V12.4.131", "80;90a"),
        ("Cuda compilation tools, release 12.8, V12.8.93", "80;90a"),
        ("Cuda compilation tools, release 12.9, V12.9.86", "80;90a;100f;120f"),
        ("nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.48\n", "80;90a;100f;120f"),
        ("", "80;90a"),
    ] {
        assert_eq!(usual(version), archs, "{version}");
        assert!(gencodes(usual(version)).is_ok());
    }
}

#[test]
fn what_is_no_architecture_is_named() {
    for arch in ["sm_90", "90b", "90af", "f", "a", "+90", "75", "90f", "9.0", "100ff", "99999999999"] {
        let error = gencodes(&format!("80;{arch}")).unwrap_err();
        assert!(error.contains(&format!("`{arch}`")), "{error}");
    }
    for none in ["", " ", ";,"] {
        assert!(gencodes(none).unwrap_err().contains("no architecture"));
    }
}

#[test]
fn the_runtime_is_static_unless_it_is_asked_for() {
    use runtime::library;
    assert_eq!([None, Some("static")].map(library), [Ok("static=cudart_static"), Ok("static=cudart_static")]);
    assert_eq!(library(Some("shared")), Ok("dylib=cudart"));
    for other in ["", "Static", "cudart"] {
        assert!(library(Some(other)).unwrap_err().contains(&format!("ARIL_CUDART is `{other}`")));
    }
}
