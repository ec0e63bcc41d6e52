//! A torch memory snapshot (the pickle of `torch.cuda.memory._dump_snapshot`) made from a report, for
//! `torch/cuda/_memory_viz.py` and the viewer at pytorch.org/memory_viz.
//!
//! Must not know: files.
//! Invariants: blocks of a segment are contiguous and sum up to it; bytes in use are the report's. What a
//! report does not hold is not made up: neighbours that the report joined are one block, named after the
//! largest in it, and the history has only the births of what is alive, in the order of their steps.

use super::model::{BlockRun, Device, Report, Segment, Site};
use crate::ledger::Frame;
use std::collections::HashMap;

/// Where the segment begins that stands for a device whose segments a report does not hold.
const MADE_UP: u64 = 0x7f00_0000_0000;

/// Writes pickle opcodes (protocol 4).
struct Pickle {
    out: Vec<u8>,
    memo: u32,
    texts: HashMap<String, u32>,
    stacks: HashMap<(i64, u32), u32>,
}

impl Pickle {
    fn new() -> Pickle {
        Pickle { out: vec![0x80, 4], memo: 0, texts: HashMap::new(), stacks: HashMap::new() }
    }

    /// Remembers what was pushed last; returns its number.
    fn memoize(&mut self) -> u32 {
        self.out.push(0x94);
        self.memo += 1;
        self.memo - 1
    }

    fn get(&mut self, number: u32) {
        self.out.push(b'j');
        self.out.extend(number.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        if let Some(&number) = self.texts.get(text) {
            return self.get(number);
        }
        self.out.push(b'X');
        self.out.extend((text.len() as u32).to_le_bytes());
        self.out.extend(text.as_bytes());
        let number = self.memoize();
        self.texts.insert(text.to_owned(), number);
    }

    fn int(&mut self, value: u64) {
        if let Ok(small) = u8::try_from(value) {
            self.out.extend([b'K', small]);
        } else if let Ok(small) = i32::try_from(value) {
            self.out.push(b'J');
            self.out.extend(small.to_le_bytes());
        } else {
            // Two's complement, least byte first; the ninth byte keeps a high bit from meaning minus.
            let bytes = value.to_le_bytes();
            let long = if bytes[7] & 0x80 != 0 { 9 } else { 8 };
            self.out.extend([0x8a, long]);
            self.out.extend(bytes);
            self.out.extend((long == 9).then_some(0));
        }
    }

    fn bool(&mut self, value: bool) {
        self.out.push(if value { 0x88 } else { 0x89 });
    }

    fn list(&mut self, items: impl FnOnce(&mut Pickle)) {
        self.out.extend([b']', b'(']);
        items(self);
        self.out.push(b'e');
    }

    fn dict(&mut self, items: impl FnOnce(&mut Pickle)) {
        self.out.extend([b'}', b'(']);
        items(self);
        self.out.push(b'u');
    }

    fn entry_int(&mut self, key: &str, value: u64) {
        self.text(key);
        self.int(value);
    }

    fn entry_text(&mut self, key: &str, value: &str) {
        self.text(key);
        self.text(value);
    }

    /// The frames of a stack, innermost first; the second time only a reference to them.
    fn frames(&mut self, stack: (i64, u32), frames: &[Frame]) {
        if let Some(&number) = self.stacks.get(&stack) {
            return self.get(number);
        }
        let unlisted =
            [Frame { function: "a site that the report does not list".to_owned(), ..Frame::default() }];
        let frames = if frames.is_empty() { &unlisted[..] } else { frames };
        self.list(|p| {
            for frame in frames {
                p.dict(|p| {
                    p.entry_text("filename", &frame.file);
                    p.entry_int("line", u64::from(frame.line));
                    p.entry_text("name", &frame.function);
                });
            }
        });
        let number = self.memoize();
        self.stacks.insert(stack, number);
    }
}

/// A block in use, for the history.
struct Birth {
    address: u64,
    bytes: u64,
    stream: u64,
    stack: u32,
    step: u32,
}

/// The pickle.
pub fn pickle(report: &Report) -> Vec<u8> {
    let sites: HashMap<(i64, u32), &Site> =
        report.sites.iter().map(|site| ((site.device, site.stack_id), site)).collect();
    let mut births: Vec<Vec<Birth>> = Vec::new();
    let mut p = Pickle::new();
    p.dict(|p| {
        p.text("segments");
        p.list(|p| {
            for device in &report.devices {
                let number = number(device);
                if births.len() <= number {
                    births.resize_with(number + 1, Vec::new);
                }
                let made_up = device.segments.is_empty().then(|| vec![stand_in(report, device)]);
                for segment in made_up.as_ref().unwrap_or(&device.segments) {
                    p.dict(|p| self::segment(p, segment, device, &sites, &mut births[number]));
                }
            }
        });
        p.text("device_traces");
        p.list(|p| {
            for (number, births) in births.iter_mut().enumerate() {
                births.sort_by_key(|birth| (birth.step, birth.address));
                let device = report.devices.iter().find(|device| self::number(device) == number);
                let device = device.map_or(number as i64, |device| device.device);
                p.list(|p| births.iter().for_each(|birth| self::birth(p, birth, device, report, &sites)));
            }
        });
        p.text("allocator_settings");
        p.dict(|p| {
            p.text("expandable_segments");
            p.bool(true);
        });
        p.text("external_annotations");
        p.list(|_| {});
    });
    p.out.push(b'.');
    p.out
}

/// The device's place in the list of histories. The host has the first.
fn number(device: &Device) -> usize {
    usize::try_from(device.device).unwrap_or(0).min(1023)
}

fn segment(
    p: &mut Pickle,
    segment: &Segment,
    device: &Device,
    sites: &HashMap<(i64, u32), &Site>,
    births: &mut Vec<Birth>,
) {
    let used: u64 = segment.runs.iter().map(|run| run.1.min(run.0)).sum();
    p.entry_int("device", number(device) as u64);
    p.entry_int("address", segment.address);
    p.entry_int("total_size", segment.runs.iter().map(|run| run.0).sum());
    p.entry_int("allocated_size", used);
    p.entry_int("active_size", used);
    p.entry_int("requested_size", used);
    p.entry_int("stream", segment.stream);
    p.entry_text("segment_type", if segment.large { "large" } else { "small" });
    p.text("segment_pool_id");
    p.out.extend([b'K', 0, b'K', 0, 0x86]);
    p.text("is_expandable");
    p.bool(true);
    p.text("frames");
    p.list(|_| {});
    p.text("blocks");
    p.list(|p| {
        let mut address = segment.address;
        for &BlockRun(bytes, used, stack, step) in &segment.runs {
            let used = used.min(bytes);
            if used > 0 {
                block(p, address, used, Some((device.device, stack)), sites);
                births.push(Birth { address, bytes: used, stream: segment.stream, stack, step });
            }
            if used < bytes {
                block(p, address + used, bytes - used, None, sites);
            }
            address += bytes;
        }
    });
}

fn block(
    p: &mut Pickle,
    address: u64,
    bytes: u64,
    stack: Option<(i64, u32)>,
    sites: &HashMap<(i64, u32), &Site>,
) {
    p.dict(|p| {
        p.entry_int("address", address);
        p.entry_int("size", bytes);
        p.entry_int("requested_size", if stack.is_some() { bytes } else { 0 });
        p.entry_text("state", if stack.is_some() { "active_allocated" } else { "inactive" });
        p.text("frames");
        match stack {
            Some(stack) => p.frames(stack, sites.get(&stack).map_or(&[], |site| &site.stack)),
            None => p.list(|_| {}),
        }
    });
}

fn birth(p: &mut Pickle, birth: &Birth, device: i64, report: &Report, sites: &HashMap<(i64, u32), &Site>) {
    let run = &report.run;
    let ago = run.steps.saturating_sub(u64::from(birth.step)) as f64 * run.step_seconds.unwrap_or(1.0);
    let time = (run.time.unwrap_or(0) as f64 - ago).max(0.0) * 1e6;
    let stack = (device, birth.stack);
    p.dict(|p| {
        p.entry_text("action", "alloc");
        p.entry_int("addr", birth.address);
        p.entry_int("size", birth.bytes);
        p.entry_int("stream", birth.stream);
        p.entry_int("time_us", time as u64);
        p.text("frames");
        p.frames(stack, sites.get(&stack).map_or(&[], |site| &site.stack));
    });
}

/// A segment that holds the listed sites' blocks, a run for each generation, and what else is known to be
/// reserved as a gap: for reports of allocators that are not strandline's.
fn stand_in(report: &Report, device: &Device) -> Segment {
    let mut runs: Vec<BlockRun> = Vec::new();
    for site in report.sites.iter().filter(|site| site.device == device.device) {
        let known: u64 = site.generations.iter().map(|generation| generation.bytes).sum();
        runs.extend(
            site.generations
                .iter()
                .filter(|generation| generation.bytes > 0)
                .map(|g| BlockRun(g.bytes, g.bytes, site.stack_id, g.first)),
        );
        let more = site.live_bytes.saturating_sub(known);
        if more > 0 {
            runs.push(BlockRun(more, more, site.stack_id, 0));
        }
    }
    let used: u64 = runs.iter().map(|run| run.1).sum();
    let reserved = device.series.last().map_or(0, |point| point.reserved).max(used);
    if reserved > used {
        runs.push(BlockRun(reserved - used, 0, 0, 0));
    }
    let address = MADE_UP + ((number(device) as u64) << 40);
    Segment { address, size: reserved, stream: 0, large: true, runs }
}
