//! strandline's own form of a recording: small, versioned, readable up to wherever it was cut.
//!
//! ```text
//! "strndln\x01"                     magic and version
//! records, each a kind and varints:
//!   NAME   length, UTF-8            numbered in order
//!   FRAME  function, file, line     names by number; numbered in order
//!   STACK  count, frames            by number; numbered in order from 1
//!   STREAM value                    numbered in order
//!   DEVICE index                    what follows is this device's
//!   EVENT+action  Δtime, Δaddress, size, stack, stream
//!   MARK   name, begins, time       annotations: steps and epochs of the clock among them
//!   SEGMENT address, size, stream, expandable, count, (size, requested, stack, state)…
//!   SETTINGS length, JSON
//!   NOTE   length, UTF-8
//!   END    events                   the trace is whole
//! ```
//! Δ are signed (zigzag) differences to the device's event before.
//!
//! Must not know: snapshots.
//! Invariant: what is read equals what was written; a cut trace gives everything before the cut, and says so.

use super::error::{Error, Result};
use super::input::Input;
use super::recording::{
    ACTIONS, Annotation, Block, BlockState, Device, Event, Form, MOST, Recording, Segment, Settings,
};
use serde_json::{Value, json};
use std::io::{self, Read, Write};

/// The first bytes of a trace, the version last.
pub const MAGIC: &[u8; 8] = b"strndln\x01";

mod kind {
    pub const END: u8 = 0;
    pub const NAME: u8 = 1;
    pub const FRAME: u8 = 2;
    pub const STACK: u8 = 3;
    pub const STREAM: u8 = 4;
    pub const DEVICE: u8 = 5;
    pub const MARK: u8 = 6;
    pub const SEGMENT: u8 = 7;
    pub const SETTINGS: u8 = 8;
    pub const NOTE: u8 = 9;
    /// EVENT + the action's number.
    pub const EVENT: u8 = 16;
}

const WITHIN: &str = "a trace's record";
const MAX_DEVICES: usize = 1024;

/// Writes a recording.
///
/// # Errors
/// What `out` says.
pub fn write(recording: &Recording, out: &mut impl Write) -> io::Result<()> {
    let mut to = Writer { out };
    to.out.write_all(MAGIC)?;
    let stacks = &recording.stacks;
    let (names, frames, count) = stacks.counts();
    for name in 0..names {
        to.text(kind::NAME, stacks.name(name))?;
    }
    for frame in 0..frames {
        let (function, file, line) = stacks.frame(frame).unwrap_or_default();
        to.record(kind::FRAME, &[function.into(), file.into(), line.into()])?;
    }
    for stack in 1..count {
        let frames = stacks.stack(stack);
        to.record(kind::STACK, &[frames.len() as u64])?;
        frames.iter().try_for_each(|frame| to.number(u64::from(*frame)))?;
    }
    for stream in &recording.streams {
        to.record(kind::STREAM, &[*stream])?;
    }
    to.text(kind::SETTINGS, &settings_to_json(&recording.settings).to_string())?;
    for note in &recording.notes {
        to.text(kind::NOTE, note)?;
    }
    for mark in &recording.annotations {
        to.record(kind::MARK, &[mark.name.into(), mark.begins.into(), mark.time_us])?;
    }
    for device in &recording.devices {
        to.record(kind::DEVICE, &[zigzag(device.index.into())])?;
        for segment in &device.segments {
            let head = [segment.address, segment.size, segment.stream, segment.expandable.into()];
            to.record(kind::SEGMENT, &head)?;
            to.number(segment.blocks.len() as u64)?;
            let mut next = segment.address;
            for block in &segment.blocks {
                to.number(block.address.wrapping_sub(next))?;
                for number in [block.size, block.requested, block.stack.into(), block.state as u64] {
                    to.number(number)?;
                }
                next = block.address.wrapping_add(block.size);
            }
        }
        let mut before = (0u64, 0u64);
        for event in &device.events {
            let time = zigzag(event.time_us.wrapping_sub(before.0) as i64);
            let address = zigzag(event.address.wrapping_sub(before.1) as i64);
            let fields = [time, address, event.size, event.stack.into(), event.stream.into()];
            to.record(kind::EVENT + event.action as u8, &fields)?;
            before = (event.time_us, event.address);
        }
    }
    to.record(kind::END, &[recording.events() as u64])
}

struct Writer<'w, W> {
    out: &'w mut W,
}

impl<W: Write> Writer<'_, W> {
    fn number(&mut self, mut number: u64) -> io::Result<()> {
        let mut bytes = [0; 10];
        let mut length = 0;
        while number >= 0x80 {
            bytes[length] = number as u8 | 0x80;
            number >>= 7;
            length += 1;
        }
        bytes[length] = number as u8;
        self.out.write_all(&bytes[..=length])
    }

    fn record(&mut self, kind: u8, numbers: &[u64]) -> io::Result<()> {
        self.out.write_all(&[kind])?;
        numbers.iter().try_for_each(|number| self.number(*number))
    }

    fn text(&mut self, kind: u8, text: &str) -> io::Result<()> {
        self.record(kind, &[text.len() as u64])?;
        self.out.write_all(text.as_bytes())
    }
}

fn zigzag(number: i64) -> u64 {
    (number << 1 ^ number >> 63) as u64
}

fn unzigzag(number: u64) -> i64 {
    (number >> 1) as i64 ^ -((number & 1) as i64)
}

fn settings_to_json(settings: &Settings) -> Value {
    json!(settings)
}

fn settings_from_json(value: &Value) -> Settings {
    let pairs = value["roundup_power2_divisions"].as_array().map(Vec::as_slice).unwrap_or_default();
    Settings {
        conf: value["conf"].as_str().unwrap_or_default().to_owned(),
        expandable_segments: value["expandable_segments"].as_bool().unwrap_or_default(),
        max_split_size: value["max_split_size"].as_u64(),
        roundup_power2_divisions: pairs
            .iter()
            .filter_map(|pair| Some((pair[0].as_u64()?, pair[1].as_u64()?)))
            .collect(),
    }
}

/// Reads a trace; a cut one up to the cut.
///
/// # Errors
/// If the bytes are no trace of this version, or contradict themselves.
pub fn read<R: Read>(input: &mut Input<R>) -> Result<Recording> {
    let magic: [u8; 8] = input.array("a trace's beginning")?;
    if magic != *MAGIC {
        let version = magic[7];
        let what = format!("a trace of version {version}; this program reads version {}", MAGIC[7]);
        return Err(Error::Corrupt { offset: 7, what });
    }
    let mut reader = Reader {
        recording: Recording { form: Form::Trace, ..Recording::default() },
        device: None,
        before: (0, 0),
        start: 0,
    };
    loop {
        match reader.record(input) {
            Ok(true) => {}
            Ok(false) => return Ok(reader.recording),
            Err(Error::Cut { offset, .. }) => return Ok(reader.cut(offset)),
            Err(error) => return Err(error),
        }
    }
}

struct Reader {
    recording: Recording,
    /// The place of the device that events belong to.
    device: Option<usize>,
    before: (u64, u64),
    /// Where the record at hand begins.
    start: u64,
}

impl Reader {
    /// What is known of a run whose trace ends at `offset`: nothing of its end.
    fn cut(mut self, offset: u64) -> Recording {
        let recording = &mut self.recording;
        let events = recording.events();
        let last = recording
            .devices
            .iter()
            .filter_map(|device| device.events.last())
            .map(|event| event.time_us)
            .max();
        recording.annotations.retain(|mark| last.is_some_and(|last| mark.time_us <= last));
        recording.devices.iter_mut().for_each(|device| device.segments.clear());
        recording
            .notes
            .push(format!("the trace is cut short: it ends at byte {offset}, after {events} events"));
        self.recording
    }

    /// Reads one record; false after the last.
    fn record<R: Read>(&mut self, input: &mut Input<R>) -> Result<bool> {
        self.start = input.offset();
        let kind = input.byte(WITHIN)?;
        match kind {
            kind::END => {
                let told = number(input)?;
                let events = self.recording.events() as u64;
                if told != events {
                    return Err(self.bad(format!("it has {events} events but says {told}")));
                }
                return Ok(false);
            }
            kind::NAME => {
                let name = self.text(input)?;
                self.recording.stacks.intern_name(&name);
            }
            kind::FRAME => {
                let (names, ..) = self.recording.stacks.counts();
                let function = self.below(input, names)?;
                let file = self.below(input, names)?;
                let line = self.below(input, u32::MAX)?;
                self.recording.stacks.intern_frame(function, file, line);
            }
            kind::STACK => {
                let (_, frames, _) = self.recording.stacks.counts();
                let count = number(input)?;
                let mut stack = Vec::new();
                for _ in 0..count {
                    stack.push(self.below(input, frames)?);
                }
                self.recording.stacks.intern_stack(&stack);
            }
            kind::STREAM => {
                let stream = number(input)?;
                if self.recording.streams.len() > usize::from(u16::MAX) {
                    return Err(self.bad("it has more than 65536 streams"));
                }
                self.recording.streams.push(stream);
            }
            kind::DEVICE => {
                let index = number(input).map(unzigzag)?;
                let index = i32::try_from(index).map_err(|_| self.bad("there is no such device"))?;
                self.enter(index)?;
            }
            kind::MARK => {
                let (names, ..) = self.recording.stacks.counts();
                let name = self.below(input, names)?;
                let begins = number(input)? != 0;
                let time_us = number(input)?;
                self.recording.annotations.push(Annotation { name, begins, time_us });
            }
            kind::SEGMENT => self.segment(input)?,
            kind::SETTINGS => {
                let text = self.text(input)?;
                let value = serde_json::from_str(&text).map_err(|_| self.bad("its settings are no JSON"))?;
                self.recording.settings = settings_from_json(&value);
            }
            kind::NOTE => {
                let note = self.text(input)?;
                self.recording.notes.push(note);
            }
            kind => {
                let action = kind.checked_sub(kind::EVENT).and_then(|at| ACTIONS.get(at as usize));
                let Some((action, _)) = action else {
                    return Err(self.bad(format!("{kind} is no kind of record")));
                };
                let time_us = self.before.0.wrapping_add(number(input).map(unzigzag)? as u64);
                let address = self.before.1.wrapping_add(number(input).map(unzigzag)? as u64);
                let size = self.size(input)?;
                let stack = self.stack(input)?;
                let streams = self.recording.streams.len() as u32;
                let stream = self.below(input, streams)? as u16;
                self.before = (time_us, address);
                let event = Event { time_us, address, size, stack, stream, action: *action };
                self.device()?.events.push(event);
            }
        }
        Ok(true)
    }

    fn segment<R: Read>(&mut self, input: &mut Input<R>) -> Result<()> {
        let (address, size) = (number(input)?, self.size(input)?);
        let (stream, expandable) = (number(input)?, number(input)? != 0);
        let mut segment = Segment { address, size, stream, expandable, blocks: Vec::new() };
        let mut next = address;
        for _ in 0..number(input)? {
            let address = next.wrapping_add(number(input)?);
            let (size, requested) = (self.size(input)?, self.size(input)?);
            let stack = self.stack(input)?;
            let state = match number(input)? {
                0 => BlockState::Allocated,
                1 => BlockState::PendingFree,
                2 => BlockState::Inactive,
                other => return Err(self.bad(format!("{other} is no state of a block"))),
            };
            next = address.wrapping_add(size);
            segment.blocks.push(Block { address, size, requested, stack, state });
        }
        self.device()?.segments.push(segment);
        Ok(())
    }

    /// Events from here on belong to device `index`.
    fn enter(&mut self, index: i32) -> Result<()> {
        let devices = &mut self.recording.devices;
        if devices.len() >= MAX_DEVICES || devices.iter().any(|device| device.index == index) {
            return Err(self.bad("a device comes twice"));
        }
        devices.push(Device { index, ..Device::default() });
        self.device = Some(devices.len() - 1);
        self.before = (0, 0);
        Ok(())
    }

    fn device(&mut self) -> Result<&mut Device> {
        let (at, start) = (self.device, self.start);
        let device = at.and_then(|at| self.recording.devices.get_mut(at));
        device.ok_or_else(|| Error::Corrupt { offset: start, what: "an event before its device".to_owned() })
    }

    fn bad(&self, what: impl Into<String>) -> Error {
        Error::Corrupt { offset: self.start, what: what.into() }
    }

    /// A number below `limit`.
    fn below<R: Read>(&self, input: &mut Input<R>, limit: u32) -> Result<u32> {
        let number = number(input)?;
        u32::try_from(number)
            .ok()
            .filter(|number| *number < limit || limit == u32::MAX)
            .ok_or_else(|| self.bad(format!("it names number {number}, but there are {limit}")))
    }

    fn size<R: Read>(&self, input: &mut Input<R>) -> Result<u64> {
        let size = number(input)?;
        if size > MOST {
            Err(self.bad(format!("{size} bytes are more than any device has")))
        } else {
            Ok(size)
        }
    }

    fn stack<R: Read>(&self, input: &mut Input<R>) -> Result<u32> {
        let (_, _, stacks) = self.recording.stacks.counts();
        self.below(input, stacks)
    }

    fn text<R: Read>(&self, input: &mut Input<R>) -> Result<String> {
        let length = number(input)?;
        let mut bytes = Vec::new();
        input.append_to(length, &mut bytes, WITHIN)?;
        String::from_utf8(bytes).map_err(|_| self.bad("a text is no UTF-8"))
    }
}

fn number<R: Read>(input: &mut Input<R>) -> Result<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = input.byte(WITHIN)?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(number);
        }
    }
    Err(Error::Corrupt { offset: input.offset(), what: "a number of more than 64 bits".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_there_and_back() {
        for given in [0, 1, 127, 128, 16_383, 16_384, u64::MAX / 2, u64::MAX] {
            let mut bytes = Vec::new();
            Writer { out: &mut bytes }.number(given).unwrap();
            assert_eq!(number(&mut Input::new(&bytes[..])).unwrap(), given);
            assert_eq!(zigzag(unzigzag(given)), given);
        }
    }
}
