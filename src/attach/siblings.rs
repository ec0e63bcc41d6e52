//! Whether processes that this one started have reported: a launcher (torchrun, accelerate, a shell) then has
//! nothing to tell of its own. Must not know what a report says.

use super::lineage;
use serde::Deserialize;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Seconds since 1970 at which this library was loaded.
static LOADED: AtomicU64 = AtomicU64::new(0);

extern "C" fn note_the_time() {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid structure; a plain system call.
    if unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &mut now) } == 0 {
        LOADED.store(now.tv_sec.max(0) as u64, Ordering::Relaxed);
    }
}

// SAFETY: the loader calls the functions of this section with three arguments that `note_the_time` ignores.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = note_the_time;

/// Whether this process has waited for children of its own.
pub fn has_had_children() -> bool {
    // SAFETY: the structure is plain data that getrusage fills in.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) == 0 && usage.ru_maxrss > 0
    }
}

/// Whether processes that this one started, or those started, have written reports into `out`; its own lies in
/// `own`. An error: `out` cannot be looked at.
pub fn have_reported(out: &Path, own: Option<&Path>) -> std::io::Result<bool> {
    if !has_had_children() {
        return Ok(false);
    }
    // A file system's clock may be coarser than ours.
    let since = UNIX_EPOCH + Duration::from_secs(LOADED.load(Ordering::Relaxed).saturating_sub(1));
    let entries = match std::fs::read_dir(out) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    let me = lineage::own();
    Ok(entries.flatten().any(|entry| {
        let folder = entry.path();
        let report = folder.join("report.json");
        Some(folder.as_path()) != own && is_newer(&report, since) && was_launched_by(&me, &report)
    }))
}

/// Whether a report is that of a process which `launcher` started: other jobs may write into the same folder.
fn was_launched_by(launcher: &str, report: &Path) -> bool {
    #[derive(Deserialize)]
    struct Report {
        run: Run,
    }
    #[derive(Deserialize)]
    struct Run {
        #[serde(default)]
        launched_by: Vec<String>,
    }
    let read = std::fs::read(report).ok().and_then(|text| serde_json::from_slice::<Report>(&text).ok());
    read.is_some_and(|report| report.run.launched_by.iter().any(|name| name == launcher))
}

fn is_newer(report: &Path, since: SystemTime) -> bool {
    std::fs::metadata(report).and_then(|found| found.modified()).is_ok_and(|written| written >= since)
}
