//! Compares the C++ layouts that strandline declares by hand with the headers of the torch that is
//! installed. The Python that has it is `STRANDLINE_TEST_PYTHON`, else `python3`. Without a torch built for
//! CUDA there is nothing to compare with: the test says so and passes, or fails if
//! `STRANDLINE_REQUIRE_TORCH` is set.

use std::path::Path;
use std::process::Command;

/// The folder of torch's package, if Python has a torch built for CUDA.
fn torch() -> Option<String> {
    let python = std::env::var("STRANDLINE_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = "import torch, os; print(os.path.dirname(torch.__file__) if torch.version.cuda else '')";
    let output = Command::new(python).args(["-c", script]).output().ok()?;
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !folder.is_empty()).then_some(folder)
}

#[test]
fn declared_layouts_are_torchs() {
    let Some(torch) = torch() else {
        assert!(std::env::var_os("STRANDLINE_REQUIRE_TORCH").is_none(), "no torch with CUDA");
        println!("skipped: no torch with CUDA; set STRANDLINE_TEST_PYTHON");
        return;
    };
    let packages = Path::new(&torch).parent().expect("a folder of packages").to_path_buf();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cuda_layouts.cpp");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_layouts");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let output = Command::new(compiler)
        .args(["-std=c++20", "-O1", "-Wno-invalid-offsetof", "-o"])
        .arg(&program)
        .arg(source)
        .arg(format!("-I{torch}/include"))
        // CUDA's own headers: the toolkit's package, and the parts that only triton ships.
        .arg(format!("-I{}/nvidia/cu13/include", packages.display()))
        .arg(format!("-I{}/nvidia/cuda_runtime/include", packages.display()))
        .arg(format!("-I{}/triton/backends/nvidia/include", packages.display()))
        .arg(format!("-L{torch}/lib"))
        .args(["-lc10", "-lc10_cuda", "-Wl,--allow-shlib-undefined"])
        .arg(format!("-Wl,-rpath,{torch}/lib"))
        .output()
        .expect("a C++ compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&program)
        .env(
            "LD_LIBRARY_PATH",
            format!("{0}/nvidia/cu13/lib:{0}/nvidia/cuda_runtime/lib", packages.display()),
        )
        .output()
        .expect("the comparison runs");
    assert!(output.status.success(), "differs: {}", String::from_utf8_lossy(&output.stdout));
}
