//! `strandline demo`: a small training job that really leaks, run as a user's job would be.

use crate::{code, paths, run};
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

const SCRIPT: &str = include_str!("../../../examples/leaky_training.py");

/// Arguments of `strandline demo`.
#[derive(Args)]
pub struct Demo {
    /// A Python that has torch
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: OsString,
    /// Folder for the job and its reports
    #[arg(long, value_name = "DIR", default_value = "strandline-out/demo")]
    out: PathBuf,
    /// Where events come from
    #[arg(long, value_enum, default_value = "auto")]
    mode: run::Mode,
}

impl Demo {
    /// Writes the job beside its reports and runs it.
    pub fn run(self) -> Result<ExitCode, String> {
        let Some(python) = paths::program(&self.python) else {
            eprintln!(
                "strandline: {}: command not found; name a Python with --python",
                self.python.display()
            );
            return Ok(ExitCode::from(code::NOT_FOUND));
        };
        let torch = Command::new(&python)
            .args(["-c", "import torch"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if !torch.is_ok_and(|status| status.success()) {
            return Err(format!(
                "{} cannot import torch; install it there (pip install torch) or name another with --python",
                python.display()
            ));
        }
        std::fs::create_dir_all(&self.out).map_err(|e| format!("--out {}: {e}", self.out.display()))?;
        let script = self.out.join("leaky_training.py");
        std::fs::write(&script, SCRIPT).map_err(|e| format!("{}: {e}", script.display()))?;
        eprintln!("strandline: running {} (a job with a leak)\n", script.display());
        run::Run {
            mode: Some(self.mode),
            out: Some(self.out),
            fail_on_leak: false,
            every: None,
            focus: None,
            openmetrics: None,
            openmetrics_listen: None,
            guard: false,
            quiet: false,
            command: vec![python.into_os_string(), script.into_os_string()],
        }
        .run()
    }
}
