//! A torch memory snapshot becomes a recording: `torch.cuda.memory._snapshot()`, `_dump_snapshot`, and the
//! older and barer forms (a list of segments, one device's history, no annotations).
//!
//! Must not know: opcodes, what the recording is used for.
//! Invariant: what the file does not tell is said in the notes, not guessed.

use super::collect::{Collector, Token, bytes, count, word};
use super::error::{Error, Result};
use super::input::Input;
use super::objects::{Objects, Shape, Value};
use super::pickle;
use super::recording::{Annotation, Block, BlockState, Device, Form, Recording, Segment, Settings};
use std::io::Read;

/// More devices than any host has.
const MAX_DEVICES: usize = 1024;

/// Reads a snapshot.
pub fn read<R: Read>(input: &mut Input<R>) -> Result<Recording> {
    let mut collector = Collector::default();
    let (mut objects, root) = pickle::read(input, &mut collector)?;
    let offset = input.offset();
    let wrong = |what: String| Error::Corrupt { offset, what };
    let parts = Parts::of(&objects, &collector, root)?;
    if let Some(segments) = parts.segments {
        read_segments(&mut objects, &mut collector, segments).map_err(wrong)?;
    }
    if let Some(annotations) = parts.annotations {
        read_annotations(&objects, &mut collector.recording, annotations).map_err(wrong)?;
    }
    if let Some(settings) = parts.settings {
        collector.recording.settings = read_settings(&objects, settings);
    }
    distribute(&objects, &mut collector, parts.traces).map_err(wrong)?;
    let mut recording = collector.recording;
    recording.devices.retain(|device| !device.events.is_empty() || !device.segments.is_empty());
    note(&mut recording, collector.unknown);
    Ok(recording)
}

/// Where the parts of a snapshot lie.
#[derive(Default)]
struct Parts {
    segments: Option<Value>,
    traces: Option<Value>,
    annotations: Option<Value>,
    settings: Option<Value>,
}

impl Parts {
    fn of(objects: &Objects, collector: &Collector, root: Value) -> Result<Parts> {
        let mut parts = Parts::default();
        if let Some(items) = objects.dict(root) {
            for (key, value) in items {
                let Value::Str(key) = key else { continue };
                match objects.text(*key) {
                    "segments" => parts.segments = Some(*value),
                    "device_traces" => parts.traces = Some(*value),
                    "external_annotations" => parts.annotations = Some(*value),
                    "allocator_settings" => parts.settings = Some(*value),
                    _ => {}
                }
            }
            if parts.segments.is_none() && parts.traces.is_none() {
                return Err(Error::Foreign(foreign_dict(objects, items)));
            }
            return Ok(parts);
        }
        if is_run(objects, root) && !collector.runs.is_empty() {
            return Ok(Parts { traces: Some(root), ..Parts::default() });
        }
        if let Some(items) = objects.sequence(root) {
            let holds = |name: &str| {
                items.iter().all(|item| objects.dict(*item).is_some_and(|d| has_key(objects, d, name)))
            };
            if holds("total_size") {
                return Ok(Parts { segments: Some(root), ..Parts::default() });
            }
            if items.iter().any(|item| is_run(objects, *item)) {
                return Ok(Parts { traces: Some(root), ..Parts::default() });
            }
        }
        Err(Error::Foreign(format!(
            "it is a pickle of {}, not what torch.cuda.memory._dump_snapshot writes (a dict with segments and \
             device_traces)",
            objects.type_name(root)
        )))
    }
}

fn has_key(objects: &Objects, items: &[(Value, Value)], name: &str) -> bool {
    items.iter().any(|(key, _)| matches!(key, Value::Str(text) if objects.text(*text) == name))
}

fn foreign_dict(objects: &Objects, items: &[(Value, Value)]) -> String {
    let keys = items.iter().filter_map(|(key, _)| match key {
        Value::Str(text) => Some(objects.text(*text).chars().take(40).collect::<String>()),
        _ => None,
    });
    let keys: Vec<String> = keys.take(6).map(|key| format!("{key:?}")).collect();
    let keys = if keys.is_empty() { "no names".to_owned() } else { keys.join(", ") };
    format!("it is a pickled dict with the keys {keys}, but without segments and device_traces")
}

fn is_run(objects: &Objects, value: Value) -> bool {
    let Value::Object(id) = value else { return false };
    matches!(objects.get(id), Shape::Taken(token) if matches!(Token::unpack(token), Token::Run(_)))
}

/// The device with that number, made if it is new.
fn device(recording: &mut Recording, index: i64) -> Result<&mut Device, String> {
    let at = usize::try_from(index).ok().filter(|at| *at < MAX_DEVICES);
    let at = at.ok_or_else(|| format!("there is no device {index}"))?;
    while recording.devices.len() <= at {
        let index = recording.devices.len() as i32;
        recording.devices.push(Device { index, ..Device::default() });
    }
    Ok(&mut recording.devices[at])
}

/// Gives each device the events of its list.
fn distribute(objects: &Objects, collector: &mut Collector, traces: Option<Value>) -> Result<(), String> {
    let Some(traces) = traces else { return Ok(()) };
    let lists = if is_run(objects, traces) { std::slice::from_ref(&traces) } else { lists(objects, traces)? };
    let mut events = std::mem::take(&mut collector.events);
    // From the last list to the first, so that what remains of `events` can be cut off and kept.
    for (index, list) in lists.iter().enumerate().rev() {
        let run = match list {
            Value::Object(id) => match objects.get(*id) {
                Shape::Taken(token) => match Token::unpack(token) {
                    Token::Run(run) => run,
                    _ => return Err("a device's history is something else".to_owned()),
                },
                Shape::List([]) | Shape::Tuple([]) => continue,
                _ => return Err(format!("a device's history is {}", objects.type_name(*list))),
            },
            _ => return Err(format!("a device's history is {}", objects.type_name(*list))),
        };
        let range = collector.runs.get(run as usize).cloned().unwrap_or_default();
        if range.end > events.len() {
            return Err("two devices share one history".to_owned());
        }
        let mut own =
            if range.start == 0 { std::mem::take(&mut events) } else { events.split_off(range.start) };
        own.truncate(range.end - range.start);
        own.shrink_to_fit();
        device(&mut collector.recording, index as i64)?.events = own;
    }
    Ok(())
}

fn lists(objects: &Objects, traces: Value) -> Result<&[Value], String> {
    match traces {
        Value::None => Ok(&[]),
        _ => {
            objects.sequence(traces).ok_or_else(|| format!("device_traces is {}", objects.type_name(traces)))
        }
    }
}

fn read_segments(objects: &mut Objects, collector: &mut Collector, segments: Value) -> Result<(), String> {
    let Some(items) = objects.sequence(segments).map(<[Value]>::to_vec) else {
        return Err(format!("segments is {}", objects.type_name(segments)));
    };
    for item in items {
        let Some(fields) = objects.dict(item) else {
            return Err(format!("a segment is {}", objects.type_name(item)));
        };
        let mut segment = Segment { address: 0, size: 0, stream: 0, expandable: false, blocks: Vec::new() };
        let (mut index, mut blocks, mut address) = (0, None, None);
        for (key, value) in fields {
            let Value::Str(key) = key else { continue };
            match objects.text(*key) {
                "device" => index = count(objects, *value, "a segment's device")? as i64,
                "address" => address = Some(word(objects, *value, "a segment's address")?),
                "total_size" => segment.size = bytes(objects, *value, "a segment's total_size")?,
                "stream" => segment.stream = word(objects, *value, "a segment's stream")?,
                "is_expandable" => segment.expandable = *value == Value::Bool(true),
                "blocks" => blocks = Some(*value),
                _ => {}
            }
        }
        segment.address = address.unwrap_or(0);
        let blocks = blocks.map(|value| {
            let Some(list) = objects.sequence(value).map(<[Value]>::to_vec) else {
                return Err(format!("a segment's blocks are {}", objects.type_name(value)));
            };
            // A list that is named by many segments would be read, and kept, once for each of them.
            if let (Value::Object(id), false) = (value, list.is_empty()) {
                objects.take(id, 0);
            }
            Ok(list)
        });
        let mut next = segment.address;
        for block in blocks.transpose()?.unwrap_or_default() {
            let block = read_block(objects, collector, block, next)?;
            // What is named twice (or overlaps) would count twice.
            if address.is_some() && block.address < next {
                return Err(format!("the blocks of segment {:#x} overlap", segment.address));
            }
            let end = block.address.checked_add(block.size).ok_or("a block ends beyond all addresses")?;
            if end - segment.address > segment.size {
                return Err(format!("a block lies outside its segment {:#x}", segment.address));
            }
            next = end;
            segment.blocks.push(block);
        }
        device(&mut collector.recording, index)?.segments.push(segment);
    }
    for device in &mut collector.recording.devices {
        device.segments.sort_by_key(|segment| segment.address);
        for pair in device.segments.windows(2) {
            if pair[0].address.saturating_add(pair[0].size) > pair[1].address {
                return Err(format!("segments overlap at {:#x}", pair[1].address));
            }
        }
    }
    Ok(())
}

/// Reads a block; older snapshots leave out its address, which is then where the block before ended.
fn read_block(
    objects: &mut Objects,
    collector: &mut Collector,
    value: Value,
    next: u64,
) -> Result<Block, String> {
    let Some(fields) = objects.dict(value) else {
        return Err(format!("a block is {}", objects.type_name(value)));
    };
    let mut block = Block { address: next, size: 0, requested: 0, stack: 0, state: BlockState::Inactive };
    let (mut frames, mut requested, mut history) = (None, None, None);
    for (key, value) in fields {
        let Value::Str(key) = key else { continue };
        match objects.text(*key) {
            "address" => block.address = word(objects, *value, "a block's address")?,
            "size" => block.size = bytes(objects, *value, "a block's size")?,
            "requested_size" => requested = Some(bytes(objects, *value, "a block's requested_size")?),
            "state" => {
                let Value::Str(state) = value else {
                    return Err(format!("a block's state is {}", objects.type_name(*value)));
                };
                block.state = match objects.text(*state) {
                    "active_allocated" => BlockState::Allocated,
                    "active_pending_free" | "active_awaiting_free" => BlockState::PendingFree,
                    _ => BlockState::Inactive,
                };
            }
            "frames" => frames = Some(*value),
            "history" => history = Some(*value),
            _ => {}
        }
    }
    // torch 1.13 and 2.0 kept a block's allocations in a list of their own.
    if let Some(first) = history.and_then(|history| objects.sequence(history)?.first().copied()) {
        for (key, value) in objects.dict(first).unwrap_or_default() {
            let Value::Str(key) = key else { continue };
            match objects.text(*key) {
                "real_size" => {
                    requested = requested.or(Some(bytes(objects, *value, "a block's real_size")?));
                }
                "frames" => frames = frames.or(Some(*value)),
                _ => {}
            }
        }
    }
    block.requested = requested.unwrap_or(block.size);
    if let Some(frames) = frames {
        block.stack = collector.stack(objects, frames)?;
    }
    Ok(block)
}

fn read_annotations(objects: &Objects, recording: &mut Recording, annotations: Value) -> Result<(), String> {
    let Some(items) = objects.sequence(annotations) else {
        return match annotations {
            Value::None => Ok(()),
            _ => Err(format!("external_annotations is {}", objects.type_name(annotations))),
        };
    };
    for item in items {
        let Some(fields) = objects.dict(*item) else {
            return Err(format!("an annotation is {}", objects.type_name(*item)));
        };
        let (mut name, mut begins, mut time_us) = ("", false, 0);
        for (key, value) in fields {
            let Value::Str(key) = key else { continue };
            match (objects.text(*key), value) {
                ("name", Value::Str(text)) => name = objects.text(*text),
                ("stage", Value::Str(text)) => begins = objects.text(*text) == "START",
                ("time_us", time) => time_us = count(objects, *time, "an annotation's time_us")?,
                _ => {}
            }
        }
        let name = recording.stacks.intern_name(name);
        recording.annotations.push(Annotation { name, begins, time_us });
    }
    recording.annotations.sort_by_key(|annotation| annotation.time_us);
    Ok(())
}

/// Settings that are missing or of another type are as by default: they decide about nothing but rounding.
fn read_settings(objects: &Objects, settings: Value) -> Settings {
    let mut read = Settings::default();
    for (key, value) in objects.dict(settings).unwrap_or_default() {
        let Value::Str(key) = key else { continue };
        match (objects.text(*key), value) {
            ("PYTORCH_CUDA_ALLOC_CONF", Value::Str(text)) => read.conf = objects.text(*text).to_owned(),
            ("expandable_segments", Value::Bool(on)) => read.expandable_segments = *on,
            ("max_split_size", Value::Int(size)) => {
                read.max_split_size = u64::try_from(*size).ok().filter(|size| *size < i64::MAX as u64);
            }
            ("roundup_power2_divisions", divisions) => {
                for (power, divisions) in objects.dict(*divisions).unwrap_or_default() {
                    if let (Value::Str(power), Value::Int(divisions)) = (power, divisions)
                        && let (Ok(power), Ok(divisions)) =
                            (objects.text(*power).parse(), u64::try_from(*divisions))
                    {
                        read.roundup_power2_divisions.push((power, divisions));
                    }
                }
                read.roundup_power2_divisions.sort_unstable();
            }
            _ => {}
        }
    }
    read
}

/// Says what the snapshot leaves out.
fn note(recording: &mut Recording, unknown: u64) {
    let events = recording.events();
    if events == 0 {
        recording.form = Form::Segments;
        recording.notes.push(
            "the snapshot holds no history (torch.cuda.memory._record_memory_history was not on): only what was \
             alive at the end is known"
                .to_owned(),
        );
        return;
    }
    if unknown > 0 {
        recording
            .notes
            .push(format!("{unknown} entries have an action that is not known; they were left out"));
    }
    let with_stack =
        recording.devices.iter().flat_map(|d| &d.events).filter(|event| event.stack != 0).count();
    if with_stack == 0 {
        recording
            .notes
            .push("the history was recorded without stacks: sites cannot be told apart".to_owned());
    }
    if recording.devices.iter().flat_map(|d| &d.events).all(|event| event.time_us == 0) {
        recording.notes.push("the history tells no times".to_owned());
    }
}
