//! `strandline replay`: a recorded run, its leak findings, and what it would need under strandline's heap.

use crate::code;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use strandline::heap::Preset;
use strandline::replay::recording::Recording;
use strandline::replay::subject::StrandlineHeap;
use strandline::replay::{file, run, summary, trace};
use strandline::report::text::Colour;

/// A file from this size on gets a progress bar.
const LONG: u64 = 8 << 20;
/// The device's memory where no limit is given: more than any job needs.
const BOUNDLESS: u64 = 4 << 40;

/// Arguments of `strandline replay`.
#[derive(Args)]
pub struct Replay {
    /// A torch memory snapshot (torch.cuda.memory._dump_snapshot; also .gz) or a strandline trace
    file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// The device's memory, for example 80GiB: would the job fit?
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    limit: Option<u64>,
    /// What the heap is to save: memory (lean) or, as in a job that does not ask otherwise, time (speed)
    #[arg(long, value_name = "lean|speed", default_value = "lean", value_parser = str::parse::<Preset>)]
    preset: Preset,
    /// Also write the recording as a strandline trace, which is much smaller
    #[arg(long, value_name = "TRACE")]
    save: Option<PathBuf>,
}

impl Replay {
    /// Reads, replays and prints.
    pub fn run(self) -> Result<ExitCode, String> {
        let name = self.file.display().to_string();
        let recording = read(&self.file).map_err(|why| format!("{name} {why}"))?;
        if let Some(path) = &self.save {
            save(&recording, path).map_err(|error| format!("--save {}: {error}", path.display()))?;
        }
        let bar =
            progress(recording.events() as u64, recording.events() > 1_000_000, "replaying", "{pos}/{len}");
        let memory = self.limit.unwrap_or(BOUNDLESS);
        let heap = |_| StrandlineHeap::new(memory, self.preset).map_err(|error| error.to_string());
        let outcome = run::replay(&recording, self.limit, heap, |done| bar.set_position(done));
        bar.finish_and_clear();
        let outcome = outcome.map_err(|why| format!("{name}: {why}"))?;
        let mut out = std::io::stdout().lock();
        let written = if self.json {
            let object = summary::json(&outcome, &recording, &name, self.preset);
            serde_json::to_writer_pretty(&mut out, &object)
                .map_err(std::io::Error::from)
                .and_then(|()| writeln!(out))
        } else {
            let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            let colour = if colour { Colour::Always } else { Colour::Never };
            write!(out, "{}", summary::text(&outcome, &recording, &name, self.preset, colour))
        };
        match written {
            // Whoever reads has read enough.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
            Err(error) => Err(format!("cannot write: {error}")),
            Ok(()) if outcome.devices.iter().any(|device| device.refusals > 0) => {
                Ok(ExitCode::from(code::DOES_NOT_FIT))
            }
            Ok(()) => Ok(ExitCode::SUCCESS),
        }
    }
}

fn read(path: &Path) -> Result<Recording, String> {
    let source = File::open(path).map_err(|error| format!("cannot be opened: {error}"))?;
    let metadata = source.metadata().map_err(|error| format!("cannot be opened: {error}"))?;
    if metadata.is_dir() {
        return Err("is a folder; name a snapshot in it".to_owned());
    }
    let length = metadata.len();
    let bar = progress(length, length >= LONG, "reading", "{bytes}/{total_bytes}");
    let recording = file::read(bar.wrap_read(source)).map_err(|error| error.to_string());
    bar.finish_and_clear();
    recording
}

fn save(recording: &Recording, path: &Path) -> std::io::Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    trace::write(recording, &mut out)?;
    out.into_inner()?.sync_all()
}

/// A bar on a terminal, if what is done takes long; else one that is not seen.
fn progress(length: u64, long: bool, what: &str, counts: &str) -> ProgressBar {
    if !long || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length);
    let template = format!("{what:<10} {{bar:40}} {counts}  {{eta}}");
    bar.set_style(ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// "80GiB", "512M", "1000000".
fn bytes(given: &str) -> Result<u64, String> {
    let given = given.trim();
    let digits = given.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(given.len());
    let (number, unit) = given.split_at(digits);
    let number: f64 = number.parse().map_err(|_| format!("{given:?} is no size; say for example 80GiB"))?;
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1u64,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("{unit:?} is no unit; KiB, MiB, GiB and TiB are")),
    };
    match number * factor as f64 {
        size if size >= 1.0 && size < BOUNDLESS as f64 => Ok(size as u64),
        _ => Err(format!("{given} is no memory that a device has")),
    }
}
