//! Finds interpreters and builds the probe; for tests and benchmarks of the stacks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

pub struct Interpreter {
    pub path: PathBuf,
    pub version: String,
    pub minor: u32,
}

/// One for each distinct version and build.
pub fn interpreters() -> Vec<Interpreter> {
    let mut candidates = Vec::new();
    if let Ok(list) = std::env::var("STRANDLINE_TEST_PYTHONS") {
        candidates.extend(list.split(':').filter(|path| !path.is_empty()).map(PathBuf::from));
    } else {
        if let Some(home) = std::env::var_os("HOME") {
            let versions = Path::new(&home).join(".pyenv/versions");
            let found = std::fs::read_dir(versions).into_iter().flatten().flatten();
            candidates.extend(found.map(|entry| entry.path().join("bin/python3")));
        }
        candidates.extend((8..=14).map(|minor| PathBuf::from(format!("python3.{minor}"))));
        candidates.push("python3".into());
    }
    let mut found = BTreeMap::new();
    for path in candidates {
        // The real path, because a shim may run any version.
        let code = "import sys; print(sys.executable, *sys.version_info[:3], sep='\\n')";
        let Ok(output) = Command::new(&path).args(["-c", code]).output() else { continue };
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<_> = text.lines().collect();
        let [executable, "3", minor, patch] = lines[..] else { continue };
        let Ok(minor) = minor.parse() else { continue };
        let real = std::fs::canonicalize(executable).unwrap_or(executable.into());
        let version = format!("3.{minor}.{patch}");
        found.insert(real, Interpreter { path: executable.into(), version, minor });
    }
    let mut found: Vec<_> = found.into_values().collect();
    found.sort_by_key(|python| python.minor);
    found
}

/// The probe of this profile, built if it is not.
pub fn probe() -> &'static Path {
    static PROBE: OnceLock<PathBuf> = OnceLock::new();
    PROBE.get_or_init(|| {
        let release = !cfg!(debug_assertions);
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(env!("CARGO_MANIFEST_DIR")).args(["build", "--example", "stack_probe"]);
        if release {
            cargo.arg("--release");
        }
        let built = cargo.output().unwrap_or_else(|error| panic!("cargo cannot be run: {error}"));
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        // <target>/<profile>/deps/<this test>
        let test = std::env::current_exe().unwrap_or_default();
        let profile = test.ancestors().nth(2).unwrap_or(Path::new("."));
        let probe = profile.join("examples/libstack_probe.so");
        assert!(probe.exists(), "{} was not built", probe.display());
        probe
    })
}
