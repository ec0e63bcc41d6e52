//! Snapshots and traces as files: what they tell, and what is said when they are cut, old or foreign.

use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write;
use strandline::heap::Preset;
use strandline::replay::clock::{self, Source};
use strandline::replay::error::Error;
use strandline::replay::recording::{Action, Form, Recording};
use strandline::replay::run::{self, Outcome};
use strandline::replay::subject::{StrandlineHeap, Subject};
use strandline::replay::{file, recorded, start, summary, trace};
use strandline::report::Verdict;

const SMALL: &[u8] = include_bytes!("data/small.pickle");
const LEAK: &[u8] = include_bytes!("data/leak.pickle.gz");
const CUT: &[u8] = include_bytes!("data/cut.pickle.gz");
const SEGMENTS: &[u8] = include_bytes!("data/segments.pickle");

fn read(bytes: &[u8]) -> Recording {
    file::read(bytes).unwrap()
}

fn replay(recording: &Recording, memory: u64) -> Outcome {
    let heap = |_| StrandlineHeap::new(memory, Preset::Lean).map_err(|error| error.to_string());
    run::replay(recording, None, heap, |_| {}).unwrap()
}

fn said(bytes: &[u8]) -> String {
    file::read(bytes).unwrap_err().to_string()
}

#[test]
fn a_small_snapshot_is_read_whole() {
    let recording = read(SMALL);
    assert_eq!(recording.form, Form::Snapshot);
    assert_eq!(recording.devices.len(), 1);
    let device = &recording.devices[0];
    assert_eq!(recording.streams, [0, 94210]);
    let count = |action| device.events.iter().filter(|event| event.action == action).count();
    assert_eq!((count(Action::OutOfMemory), count(Action::Snapshot)), (1, 1));
    let oom = device.events.iter().find(|event| event.action == Action::OutOfMemory).unwrap();
    assert_eq!((oom.size, oom.address), (5_000_000, 90 << 30));
    assert_eq!(recording.annotations.len(), 12);
    let alloc = device.events.iter().find(|event| event.action == Action::Alloc).unwrap();
    let frame = recording.stacks.frames(alloc.stack).last().unwrap();
    assert_eq!((frame.function, frame.file, frame.line), ("<module>", "/job/train.py", 31));
    let start = start::before(device, &recording.streams);
    assert!(start.is_whole());
    let told = recorded::figures(device, &start, &recording.settings);
    assert!(told.active_exact);
    assert_eq!((told.requested_peak, told.reserved_peak), (SMALL_REQUESTED, SMALL_RESERVED));
    assert_eq!(told.out_of_memory, 1);
}

const SMALL_REQUESTED: u64 = 13_376_920;
const SMALL_RESERVED: u64 = 50_331_648;

#[test]
fn a_delayed_free_keeps_its_memory_until_it_is_completed() {
    let recording = read(SMALL);
    let outcome = replay(&recording, 1 << 40);
    let device = &outcome.devices[0];
    assert!(device.tally.events > 0, "the heap asked for no event: {:?}", device.tally);
    assert_eq!(device.refusals, 0);
    let told = &device.out_of_memory[0];
    assert_eq!((told.size, told.device_free, told.would_fit), (5_000_000, 90 << 30, true));
}

#[test]
fn cut_anywhere_it_is_an_error_that_says_where() {
    for length in 0..SMALL.len() {
        match file::read(&SMALL[..length]) {
            Err(Error::Cut { offset, .. }) => assert_eq!(offset, length as u64),
            Err(Error::Foreign(what)) if length == 0 => assert_eq!(what, "it is empty"),
            other => panic!("cut at {length}: {:?}", other.map(|recording| recording.events())),
        }
    }
}

#[test]
fn a_spoiled_byte_never_panics() {
    for at in 0..SMALL.len() {
        let mut bytes = SMALL.to_vec();
        bytes[at] ^= [0x01, 0x80, 0xff][at % 3];
        if let Ok(recording) = file::read(&bytes[..]) {
            let steps = clock::steps(&recording);
            assert_eq!(steps.ends.len(), recording.devices.len());
            for device in &recording.devices {
                let start = start::before(device, &recording.streams);
                recorded::figures(device, &start, &recording.settings);
            }
        }
    }
}

#[test]
fn compressed_files_are_read_and_cut_ones_refused() {
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    gz.write_all(SMALL).unwrap();
    let gz = gz.finish().unwrap();
    assert_eq!(read(&gz).devices, read(SMALL).devices);
    for length in (2..gz.len() - 8).step_by(7) {
        let error = file::read(&gz[..length]).unwrap_err();
        assert!(
            matches!(error, Error::Cut { .. } | Error::Io { .. } | Error::Foreign(_)),
            "{length}: {error}"
        );
    }
    let mut spoiled = gz.clone();
    let middle = spoiled.len() / 2;
    spoiled[middle..middle + 8].fill(0xff);
    file::read(&spoiled[..]).unwrap_err();
}

#[test]
fn foreign_files_are_named() {
    let cases: &[(&[u8], &str)] = &[
        (b"", "is not a snapshot: it is empty"),
        (
            b"PK\x03\x04rest",
            "is not a snapshot: it is a zip archive (a torch.save checkpoint?), not a memory snapshot",
        ),
        (
            b"{\"traceEvents\": []}",
            "is not a snapshot: it is JSON (a profiler's trace?), not a memory snapshot",
        ),
        (b"[1, 2, 3]", "is not a snapshot: it is JSON (a list), not a memory snapshot"),
        (
            b"<!DOCTYPE html>",
            "is not a snapshot: it is HTML (a memory_viz page?); give the pickle that it was made from",
        ),
        (b"cos\nsystem\n(S'id'\ntR.", "is not a snapshot: it wants to call os.system (GLOBAL at byte 0)"),
        (
            b"\x80\x04}\x94(\x8c\x05model\x94K\x01\x8c\x05epoch\x94K\x02u.",
            "is not a snapshot: it is a pickled dict with the keys \"model\", \"epoch\", but without segments and device_traces",
        ),
        (
            b"\x80\x04K\x2a.",
            "is not a snapshot: it is a pickle of an int, not what torch.cuda.memory._dump_snapshot writes (a dict with segments and device_traces)",
        ),
        (b"strndln\x07", "is corrupt at byte 7: a trace of version 7; this program reads version 1"),
    ];
    for (bytes, message) in cases {
        assert_eq!(said(bytes), *message);
    }
}

#[test]
fn what_is_named_twice_counts_once_or_is_refused() {
    // Two segments, the second the first again.
    let segment = b"}\x94(\x8c\x07address\x94K\x00\x8c\x0atotal_size\x94M\x00\x02\x8c\x06blocks\x94]u";
    let mut bytes = b"\x80\x04](".to_vec();
    bytes.extend(segment);
    bytes.extend(b"h\x00e.");
    assert!(said(&bytes).contains("segments overlap"), "{}", said(&bytes));
    // A history whose entry comes a hundred times by its memo.
    let mut bytes = b"\x80\x04}\x8c\x0ddevice_traces](](}\x94(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x07\x8c\x04sizeK\x09u".to_vec();
    bytes.extend(b"h\x00".repeat(99));
    bytes.extend(b"ees.");
    assert_eq!(read(&bytes).events(), 100);
    // Entries of another kind among them.
    let bytes = b"\x80\x04}\x8c\x0ddevice_traces](](}(\x8c\x06action\x8c\x05allocuK\x05ees.";
    assert!(said(bytes).contains("an int stands among a history's entries"), "{}", said(bytes));
    let bytes =
        b"\x80\x04}\x8c\x0ddevice_traces](](}(\x8c\x06action\x8c\x05alloc\x8c\x04sizeJ\xff\xff\xff\xffuees.";
    assert!(said(bytes).contains("an entry's size is negative: -1"), "{}", said(bytes));
}

#[test]
fn a_trace_gives_back_what_was_written() {
    for bytes in [SMALL, LEAK, CUT, SEGMENTS] {
        let recording = read(bytes);
        let mut written = Vec::new();
        trace::write(&recording, &mut written).unwrap();
        let again = read(&written);
        assert_eq!(again.form, Form::Trace);
        assert_eq!(again.devices, recording.devices);
        assert_eq!(again.annotations, recording.annotations);
        assert_eq!(again.settings, recording.settings);
        assert_eq!(again.streams, recording.streams);
        assert_eq!(again.notes, recording.notes);
        let (_, _, stacks) = recording.stacks.counts();
        for stack in 0..stacks {
            assert!(again.stacks.frames(stack).eq(recording.stacks.frames(stack)));
        }
    }
}

#[test]
fn a_cut_trace_is_read_up_to_the_cut() {
    let recording = read(SMALL);
    let mut written = Vec::new();
    trace::write(&recording, &mut written).unwrap();
    let mut before = 0;
    for length in 8..written.len() {
        let cut = file::read(&written[..length]).unwrap();
        assert!(cut.notes.iter().any(|note| note.starts_with("the trace is cut short")), "{length}");
        assert!(cut.events() >= before);
        before = cut.events();
        for (cut, whole) in cut.devices.iter().zip(&recording.devices) {
            assert_eq!(cut.events, whole.events[..cut.events.len()]);
            assert!(cut.segments.is_empty(), "they tell of the end, which is not known");
        }
    }
    assert_eq!(before, recording.events());
    for at in 8..written.len() {
        let mut spoiled = written.clone();
        spoiled[at] ^= 0xff;
        let _ = file::read(&spoiled[..]);
    }
}

#[test]
fn a_leak_is_found_with_its_place() {
    let recording = read(LEAK);
    let outcome = replay(&recording, 1 << 40);
    assert_eq!(outcome.steps.source, Source::Annotations { name: "Optimizer.step#Adam.step".to_owned() });
    assert_eq!(outcome.steps.count(), 60);
    assert_eq!(outcome.steps.epochs, [0, 15, 30, 45]);
    assert_eq!(outcome.report.verdict, Verdict::Leak);
    let [finding] = &outcome.report.findings[..] else { panic!("{:?}", outcome.report.findings) };
    let at = finding.allocated_at.as_ref().unwrap();
    assert_eq!((at.file.as_str(), at.line), ("/job/train.py", 12));
    assert_eq!(finding.bytes_per_step, 70_000.0);
    let json = summary::json(&outcome, &recording, "leak", Preset::Lean);
    assert_eq!(json["requested_peak"], LEAK_REQUESTED);
    assert_eq!(json["recorded_reserved_peak"], LEAK_RESERVED);
    assert_eq!(json["complete"], true);
    assert_eq!(json["events"], recording.events());
    assert_eq!(json["findings"][0]["class"], "per-iteration");
    for key in ["active_peak", "reserved_peak", "driver_calls"] {
        assert!(json[key].as_u64().is_some_and(|figure| figure > 0), "{key}");
    }
}

const LEAK_REQUESTED: u64 = 17_486_440;
const LEAK_RESERVED: u64 = 33_554_432;

#[test]
fn a_history_that_was_cut_says_what_it_cannot_tell() {
    let recording = read(CUT);
    let device = &recording.devices[0];
    let start = start::before(device, &recording.streams);
    // The job's end is known, so what was there when the history begins is too.
    let whole = read(LEAK);
    let gone = whole.devices[0].events.len() - device.events.len();
    let mut live = std::collections::BTreeMap::new();
    for event in &whole.devices[0].events[..gone] {
        match event.action {
            Action::Alloc => drop(live.insert(event.address, event.size)),
            Action::FreeRequested => drop(live.remove(&event.address)),
            _ => {}
        }
    }
    let told: Vec<(u64, u64)> =
        start.blocks.iter().filter(|b| !b.pending).map(|b| (b.address, b.requested)).collect();
    assert_eq!(told, live.into_iter().collect::<Vec<_>>());
    let outcome = replay(&recording, 1 << 40);
    assert_eq!(outcome.steps.source, Source::OptimizerFrames);
    assert!((39..=41).contains(&outcome.steps.count()), "{}", outcome.steps.count());
    assert!(
        outcome.notes.iter().any(|note| note.contains("does not reach back to the start")),
        "{:?}",
        outcome.notes
    );
    let finding = &outcome.report.findings[0];
    assert_eq!(finding.allocated_at.as_ref().unwrap().line, 12);
    let json = summary::json(&outcome, &recording, "cut", Preset::Lean);
    assert_eq!(json["complete"], false);
    assert_eq!(json["recorded_reserved_peak"], LEAK_RESERVED);
}

#[test]
fn steps_beyond_the_history_do_not_count() {
    let mut recording = read(LEAK);
    let steps = clock::steps(&recording);
    let middle = steps.ends[0][19];
    // The ring buffer lost the first twenty steps; the annotations are all there.
    recording.devices[0].events.drain(..middle);
    let late = clock::steps(&recording);
    assert_eq!(late.count(), 40);
    let middle = late.ends[0][9];
    recording.devices[0].events.truncate(middle);
    assert_eq!(clock::steps(&recording).count(), 10);
}

#[test]
fn the_period_finds_the_same_steps_as_annotations() {
    let recording = read(LEAK);
    let period = clock::by_period(&recording).unwrap();
    assert!((59..=61).contains(&period.count()), "{}", period.count());
    assert!(matches!(period.source, Source::Period { .. }));
    let frames = clock::by_frames(&recording).unwrap();
    assert_eq!(frames.count(), 60);
    // The optimizer's last allocation comes before its annotation ends, nothing else between.
    let annotated = clock::by_annotations(&recording).unwrap();
    for (frames, annotated) in frames.ends[0].iter().zip(&annotated.ends[0]) {
        assert!(frames.abs_diff(*annotated) <= 15, "{frames} {annotated}");
    }
}

#[test]
fn segments_alone_tell_the_end() {
    let recording = read(SEGMENTS);
    assert_eq!(recording.form, Form::Segments);
    assert!(recording.notes[0].contains("holds no history"));
    let outcome = replay(&recording, 1 << 40);
    let figures = &outcome.devices[0];
    let blocks = recording.devices[0].segments.iter().flat_map(|segment| &segment.blocks);
    let requested: u64 = blocks
        .filter(|b| b.state == strandline::replay::recording::BlockState::Allocated)
        .map(|b| b.requested)
        .sum();
    assert_eq!(figures.recorded.requested_peak, requested);
    assert!(figures.figures.reserved_peak >= requested);
    assert_eq!(outcome.report.verdict, Verdict::Undecided);
}

#[test]
fn a_limit_refuses_and_goes_on() {
    let recording = read(LEAK);
    let outcome = replay(&recording, 8 << 20);
    let device = &outcome.devices[0];
    assert!(device.refusals > 0);
    assert!(device.refused.as_ref().unwrap().why.contains("out of memory"));
    assert!(device.figures.reserved_peak <= 8 << 20);
    // The findings are the recorded run's all the same.
    assert_eq!(outcome.report.verdict, Verdict::Leak);
}

#[test]
fn blocks_that_overlap_are_noticed() {
    struct Broken;
    impl Subject for Broken {
        fn malloc(&mut self, _: u32, _: u64, _: strandline::driver::Stream) -> Result<u64, String> {
            Ok(0x1000)
        }
        fn free(&mut self, _: u64) -> Result<(), String> {
            Ok(())
        }
        fn free_in_use(&mut self, _: u64) -> Result<u64, String> {
            Ok(0)
        }
        fn completed(&mut self, _: u64) {}
        fn figures(&self) -> strandline::replay::subject::Figures {
            Default::default()
        }
        fn tally(&self) -> strandline::replay::price::Tally {
            Default::default()
        }
    }
    let error = run::replay(&read(SMALL), None, |_| Ok(Broken), |_| {}).unwrap_err();
    assert!(error.contains("a bug"), "{error}");
}
