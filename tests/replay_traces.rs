//! The figures of recorded jobs, as told beside the recordings.

use serde_json::Value;
use std::fs::File;
use std::path::PathBuf;
use strandline::replay::{clock, file, recorded, start};

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
