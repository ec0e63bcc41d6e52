//! The figures of recorded jobs, as told beside the recordings.

use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use strandline::heap::Preset;
use strandline::replay::subject::StrandlineHeap;
use strandline::replay::{clock, file, recorded, run, start, summary};

/// The folder of recordings, where the environment names one.
fn folder() -> Option<PathBuf> {
    std::env::var_os("STRANDLINE_TRACES").map(PathBuf::from)
}

#[test]
fn peaks_are_those_of_the_recorded_allocator() {
    let Some(folder) = folder() else { return };
    let told: Value = serde_json::from_reader(File::open(folder.join("traces.json")).unwrap()).unwrap();
    for (name, told) in told.as_object().unwrap() {
        let began = std::time::Instant::now();
        let recording = file::read(File::open(folder.join(format!("{name}.pickle.gz"))).unwrap()).unwrap();
        let read = began.elapsed();
        assert_eq!(recording.devices.len(), 1, "{name}");
        let device = &recording.devices[0];
        let start = start::before(device, &recording.streams);
        let figures = recorded::figures(device, &start, &recording.settings);
        eprintln!(
            "{name}: {} events, read in {read:?}, all in {:?}: {figures:?}",
            recording.events(),
            began.elapsed()
        );
        assert!(start.is_whole(), "{name}");
        for (key, value) in [
            ("requested_peak", figures.requested_peak),
            ("active_peak", figures.active_peak),
            ("native_reserved_peak", figures.reserved_peak),
            ("allocations", figures.allocations),
        ] {
            assert_eq!(told[key].as_u64(), Some(value), "{name}: {key}");
        }
        assert!(figures.active_exact, "{name}");
    }
}

#[test]
fn steps_are_found_with_and_without_annotations() {
    let Some(folder) = folder() else { return };
    let told: Value = serde_json::from_reader(File::open(folder.join("traces.json")).unwrap()).unwrap();
    for (name, told) in told.as_object().unwrap() {
        let recording = file::read(File::open(folder.join(format!("{name}.pickle.gz"))).unwrap()).unwrap();
        let steps = told["steps"].as_u64().unwrap() as usize;
        let annotated = clock::steps(&recording);
        assert!(matches!(annotated.source, clock::Source::Annotations { .. }), "{name}");
        assert_eq!(annotated.count(), steps, "{name}");
        let frames = clock::by_frames(&recording).map(|steps| steps.count());
        let period = clock::by_period(&recording).map(|steps| (steps.source.clone(), steps.count()));
        eprintln!(
            "{name}: {steps} steps, by frames {frames:?}, by period {period:?}, epochs {:?}",
            annotated.epochs
        );
    }
}

/// What is known of a job, where the folder of jobs lies beside that of recordings.
fn truth(folder: &Path) -> Option<Value> {
    let file = File::open(folder.join("../workloads/truth.json")).ok()?;
    serde_json::from_reader(file).ok()
}

#[test]
fn findings_are_those_of_the_job() {
    let Some(folder) = folder() else { return };
    let Some(truth) = truth(&folder) else { return };
    let told: Value = serde_json::from_reader(File::open(folder.join("traces.json")).unwrap()).unwrap();
    let mut wrong = Vec::new();
    for name in told.as_object().unwrap().keys() {
        let truth = &truth[name];
        let recording = file::read(File::open(folder.join(format!("{name}.pickle.gz"))).unwrap()).unwrap();
        let heap = |_| StrandlineHeap::new(1 << 40, Preset::Lean).map_err(|error| error.to_string());
        let outcome = run::replay(&recording, None, heap, |_| {}).unwrap();
        let findings = summary::json(&outcome, &recording, name, Preset::Lean)["findings"].take();
        let found = findings.as_array().unwrap();
        let class = truth["class"].as_str().unwrap();
        let line = |finding: &Value| {
            let at = &finding["allocated_at"];
            format!("{}:{}", at["file"].as_str().unwrap_or("").rsplit('/').next().unwrap(), at["line"])
        };
        let said: Vec<_> = found.iter().map(|f| (f["class"].as_str().unwrap(), line(f))).collect();
        eprintln!("{name}: {class}, said {said:?}");
        let right = match class {
            "clean" => found.is_empty(),
            _ => {
                found.len() == 1
                    && found.iter().any(|finding| {
                        finding["class"] == class
                            && (class == "fragmentation" || truth["alloc_site"] == line(finding))
                    })
            }
        };
        if !right {
            wrong.push(name.clone());
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
