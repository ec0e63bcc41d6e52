//! Real torch, on a machine without a GPU, allocating CUDA memory through strandline.
//!
//! Stand-ins for libcudart and libcuda (tests/fake_cuda) make torch believe in a GPU; the allocator behind
//! torch's functions is the test service (tests/fake_cuda/service.rs) over the CUDA driver. The cases are
//! in tests/fake_cuda/torch_cases.py, each in a process of its own. The Python that has torch is
//! `STRANDLINE_TEST_PYTHON`, else `python3`. Without a torch built for CUDA 13 the tests say so
//! and pass, or fail if `STRANDLINE_REQUIRE_TORCH` is set.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// What the cases run with.
struct Bench {
    python: String,
    service: PathBuf,
    /// The library with the heap.
    heap: PathBuf,
    /// Holds the stand-ins.
    folder: PathBuf,
}

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn bench() -> Option<&'static Bench> {
    static BENCH: OnceLock<Option<Bench>> = OnceLock::new();
    BENCH.get_or_init(set_up).as_ref()
}

fn set_up() -> Option<Bench> {
    let python = std::env::var("STRANDLINE_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = "import torch, os; v = torch.version.cuda; \
                  print(os.path.dirname(os.path.dirname(torch.__file__)) if v and v.startswith('13') else '')";
    let output = Command::new(&python).args(["-c", script]).output().ok()?;
    let packages = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || packages.is_empty() {
        assert!(std::env::var_os("STRANDLINE_REQUIRE_TORCH").is_none(), "no torch for CUDA 13");
        println!("skipped: no torch for CUDA 13; set STRANDLINE_TEST_PYTHON");
        return None;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_cuda");
    std::fs::create_dir_all(&folder).expect("a folder for the stand-ins");
    compile("CC", "cc", &source("tests/fake_cuda/libcuda.c"), &folder.join("libcuda.so.1"), &[]);
    let headers = ["nvidia/cu13/include", "triton/backends/nvidia/include"];
    let mut headers: Vec<String> = headers.iter().map(|path| format!("-I{packages}/{path}")).collect();
    compile("CC", "cc", &source("tests/fake_cuda/cudart.c"), &folder.join("libfakecudart.so"), &headers);
    headers.extend([format!("-isystem{packages}/torch/include"), "-std=c++20".into()]);
    headers.extend([format!("-L{packages}/torch/lib"), "-Wl,--no-as-needed".into()]);
    headers.extend(["-lc10".into(), "-lc10_cuda".into()]);
    compile(
        "CXX",
        "c++",
        &source("tests/fake_cuda/checkpoint.cpp"),
        &folder.join("libcheckpoint.so"),
        &headers,
    );
    // `cargo test --test cuda_torch` does not build examples by itself.
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--example", "torch_service"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("cargo").success(), "the test service does not build");
    // target/<profile>/deps/<this test>
    let exe = std::env::current_exe().expect("this binary");
    let profile = exe.ancestors().nth(2).expect("the profile's folder");
    let service = profile.join("examples/libtorch_service.so");
    Some(Bench { python, service, heap: profile.join("deps/libstrandline.so"), folder })
}

/// The compiler is what the variable names, or the usual one.
fn compile(variable: &str, usual: &str, source: &Path, to: &Path, flags: &[String]) {
    let compiler = std::env::var(variable).unwrap_or_else(|_| usual.into());
    let output = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-O1", "-shared", "-fPIC", "-o"])
        .arg(to)
        .args(flags)
        .arg(source)
        .output()
        .expect("a compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn case(name: &str, settings: &[(&str, &str)], preload: bool) {
    let Some(bench) = bench() else { return };
    let fake = bench.folder.join("libfakecudart.so").display().to_string();
    let preloaded = if preload { format!("{fake}:{}", bench.service.display()) } else { fake };
    let output = Command::new(&bench.python)
        .arg(source("tests/fake_cuda/torch_cases.py"))
        .arg(name)
        .env("LD_PRELOAD", preloaded)
        .env("LD_LIBRARY_PATH", &bench.folder)
        .env("FAKE_CUDA_VERBOSE", "1")
        .env("STRANDLINE_TEST_SERVICE", &bench.service)
        .env("STRANDLINE_TEST_CHECKPOINT", bench.folder.join("libcheckpoint.so"))
        .env("STRANDLINE_TEST_PYTHON_SIDE", source("python/strandline/_torch_cuda.py"))
        .envs(settings.iter().copied())
        .output()
        .expect("Python starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains(&format!("passed {name}")), "{name}:\n{out}\n{err}");
    assert!(!err.contains("misuse"), "{name}:\n{err}");
}

/// The heap itself behind torch's functions, in a case that needs no kernel.
#[test]
fn pools_of_the_heap_are_put_back() {
    let Some(bench) = bench() else { return };
    let output = Command::new(&bench.python)
        .arg(source("tests/cuda_gpu.py"))
        .args(["--case", "checkpoint_blocks"])
        .arg(&bench.heap)
        .current_dir(&bench.folder)
        .env("LD_PRELOAD", bench.folder.join("libfakecudart.so"))
        .env("LD_LIBRARY_PATH", &bench.folder)
        .env("FAKE_CUDA_VERBOSE", "1")
        .output()
        .expect("Python starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("PASS: "), "{out}\n{err}");
    assert!(!err.contains("misuse"), "{err}");
}

macro_rules! cases {
    ($($name:ident $settings:expr, $preload:expr;)*) => {$(
        #[test]
        fn $name() {
            case(stringify!($name), &$settings, $preload);
        }
    )*};
}

cases! {
    everything_is_replaced [], false;
    statistics [], false;
    snapshot [], false;
    out_of_memory [], false;
    backward_lines [], false;
    fault_of_our_own [], false;
    fault_is_survived [], false;
    sizes_and_deleters [], false;
    streams [], false;
    pools [], false;
    checkpoints [], false;
    checkpoints_in_cpp [], false;
    plain_graphs [], false;
    profiler [], false;
    peers [("FAKE_CUDA_DEVICES", "2")], false;
    no_peers [("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_NO_PEERS", "1")], false;
    sharing [], false;
    plain_plug_in [], false;
    observer [], true;
    too_late [], false;
    settings [], false;
    children [], false;
    exit [], false;
}
