//! Folds the entries of a snapshot's history into events while the pickle is read.
//!
//! Must not know: opcodes; what the rest of the snapshot means.
//! Invariant: an entry is read once; what was read keeps 8 bytes in the pickle's objects.

use super::objects::{Id, Objects, Shape, Value};
use super::pickle::Sink;
use super::recording::{ACTIONS, Action, Event, MOST, Recording};
use hashbrown::HashMap;
use std::ops::Range;

/// What stands where something was taken: the kind in the two highest bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    Event(u32),
    Run(u32),
    Stack(u32),
    Frame(u32),
}

const NUMBER: u32 = (1 << 30) - 1;

impl Token {
    fn pack(self) -> Result<u32, String> {
        let (kind, number) = match self {
            Token::Event(number) => (0, number),
            Token::Run(number) => (1, number),
            Token::Stack(number) => (2, number),
            Token::Frame(number) => (3, number),
        };
        if number > NUMBER {
            return Err("more entries than can be numbered".to_owned());
        }
        Ok(kind << 30 | number)
    }

    pub fn unpack(token: u32) -> Token {
        let number = token & NUMBER;
        match token >> 30 {
            0 => Token::Event(number),
            1 => Token::Run(number),
            2 => Token::Stack(number),
            _ => Token::Frame(number),
        }
    }
}

/// Collects events, and all stacks that they name.
#[derive(Default)]
pub struct Collector {
    /// Takes the stacks and streams.
    pub recording: Recording,
    pub events: Vec<Event>,
    /// The events of each list that held some.
    pub runs: Vec<Range<usize>>,
    /// Entries whose action is not known.
    pub unknown: u64,
    streams: HashMap<u64, u16, foldhash::fast::FixedState>,
    scratch: Vec<Value>,
}

impl Sink for Collector {
    fn append(&mut self, objects: &mut Objects, list: Id, items: &[Value]) -> Result<bool, String> {
        let run = match objects.get(list) {
            Shape::Taken(token) => match Token::unpack(token) {
                Token::Run(run) => run,
                _ => return Ok(false),
            },
            Shape::List(before) => {
                // A list is a history if it begins with an entry.
                if !before.is_empty() || !items.first().is_some_and(|item| is_entry(objects, *item)) {
                    return Ok(false);
                }
                let run = self.runs.len() as u32;
                objects.take(list, Token::Run(run).pack()?);
                self.runs.push(self.events.len()..self.events.len());
                run
            }
            _ => return Ok(false),
        };
        if self.runs[run as usize].end != self.events.len() {
            return Err("two histories are mixed".to_owned());
        }
        for item in items {
            self.entry(objects, *item)?;
        }
        self.runs[run as usize].end = self.events.len();
        Ok(true)
    }
}

fn is_entry(objects: &Objects, value: Value) -> bool {
    let Value::Object(id) = value else { return false };
    match objects.get(id) {
        Shape::Dict(items) => {
            items.iter().any(|(key, _)| matches!(key, Value::Str(t) if objects.text(*t) == "action"))
        }
        Shape::Taken(token) => matches!(Token::unpack(token), Token::Event(_)),
        _ => false,
    }
}

impl Collector {
    fn entry(&mut self, objects: &mut Objects, value: Value) -> Result<(), String> {
        let Value::Object(id) = value else {
            return Err(format!("{} stands among a history's entries", objects.type_name(value)));
        };
        match objects.get(id) {
            Shape::Taken(token) => {
                // The same entry again.
                let Token::Event(number) = Token::unpack(token) else {
                    return Err("something that is no entry stands among a history's entries".to_owned());
                };
                if let Some(event) = self.events.get(number as usize) {
                    self.events.push(*event);
                }
                return Ok(());
            }
            Shape::Dict(_) => {}
            _ => return Err(format!("{} stands among a history's entries", objects.type_name(value))),
        }
        let number = match self.event(objects, value)? {
            Some(event) => {
                self.events.push(event);
                self.events.len() as u32 - 1
            }
            None => {
                self.unknown += 1;
                NUMBER
            }
        };
        objects.take(id, Token::Event(number).pack()?);
        Ok(())
    }

    /// Reads one entry; None where its action is not known.
    fn event(&mut self, objects: &mut Objects, value: Value) -> Result<Option<Event>, String> {
        let mut action = None;
        let (mut address, mut size, mut stream, mut time_us, mut frames) = (0, 0, 0, 0, None);
        let mut device_free = 0;
        for (key, value) in objects.dict(value).unwrap_or_default() {
            let Value::Str(key) = key else { continue };
            match objects.text(*key) {
                "action" => {
                    let Value::Str(name) = value else {
                        return Err(format!("an entry's action is {}", objects.type_name(*value)));
                    };
                    let name = objects.text(*name);
                    action = ACTIONS.iter().find(|(_, known)| *known == name).map(|(action, _)| *action);
                }
                "addr" => address = word(objects, *value, "an entry's addr")?,
                "size" => size = bytes(objects, *value, "an entry's size")?,
                "stream" => stream = word(objects, *value, "an entry's stream")?,
                "time_us" => time_us = count(objects, *value, "an entry's time_us")?,
                "device_free" => device_free = count(objects, *value, "an entry's device_free")?,
                "frames" => frames = Some(*value),
                _ => {}
            }
        }
        let Some(action) = action else { return Ok(None) };
        if action == Action::OutOfMemory {
            address = device_free;
        }
        let stack = frames.map_or(Ok(0), |frames| self.stack(objects, frames))?;
        let stream = self.stream(stream)?;
        Ok(Some(Event { time_us, address, size, stack, stream, action }))
    }

    /// The number of a stream.
    fn stream(&mut self, stream: u64) -> Result<u16, String> {
        if let Some(known) = self.streams.get(&stream) {
            return Ok(*known);
        }
        let number = u16::try_from(self.streams.len()).map_err(|_| "it names more than 65536 streams")?;
        self.streams.insert(stream, number);
        self.recording.streams.push(stream);
        Ok(number)
    }

    /// The number of the stack that `frames` lists; the list is taken.
    pub fn stack(&mut self, objects: &mut Objects, frames: Value) -> Result<u32, String> {
        let Value::Object(id) = frames else {
            return match frames {
                Value::None => Ok(0),
                _ => Err(format!("frames are {}", objects.type_name(frames))),
            };
        };
        match objects.get(id) {
            Shape::Taken(token) => match Token::unpack(token) {
                Token::Stack(stack) => return Ok(stack),
                _ => return Err("frames are something else".to_owned()),
            },
            Shape::List(items) | Shape::Tuple(items) => {
                self.scratch.clear();
                self.scratch.extend_from_slice(items);
            }
            _ => return Err(format!("frames are {}", objects.type_name(frames))),
        }
        let items = std::mem::take(&mut self.scratch);
        let numbers: Result<Vec<u32>, String> = items.iter().map(|item| self.frame(objects, *item)).collect();
        self.scratch = items;
        let stack = self.recording.stacks.intern_stack(&numbers?);
        objects.take(id, Token::Stack(stack).pack()?);
        Ok(stack)
    }

    fn frame(&mut self, objects: &mut Objects, value: Value) -> Result<u32, String> {
        let Value::Object(id) = value else { return Err(format!("a frame is {}", objects.type_name(value))) };
        let items = match objects.get(id) {
            Shape::Taken(token) => match Token::unpack(token) {
                Token::Frame(frame) => return Ok(frame),
                _ => return Err("a frame is something else".to_owned()),
            },
            Shape::Dict(items) => items,
            _ => return Err(format!("a frame is {}", objects.type_name(value))),
        };
        let (mut function, mut file, mut line) = ("", "", 0);
        for (key, value) in items {
            let Value::Str(key) = key else { continue };
            match (objects.text(*key), value) {
                ("name", Value::Str(text)) => function = objects.text(*text),
                ("filename", Value::Str(text)) => file = objects.text(*text),
                ("line", Value::Int(number)) => line = u32::try_from(*number).unwrap_or(0),
                _ => {}
            }
        }
        let stacks = &mut self.recording.stacks;
        let (function, file) = (stacks.intern_name(function), stacks.intern_name(file));
        let frame = stacks.intern_frame(function, file, line);
        objects.take(id, Token::Frame(frame).pack()?);
        Ok(frame)
    }
}

/// A 64-bit word: an address or a stream, which Python may show as a negative number.
pub fn word(objects: &Objects, value: Value, what: &str) -> Result<u64, String> {
    match value {
        Value::Int(number) => Ok(number as u64),
        Value::Object(id) => match objects.get(id) {
            // An unsigned word whose highest bit is set has a ninth byte for its sign.
            Shape::BigInt([word @ .., 0]) if word.len() == 8 => {
                Ok(word.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
            }
            _ => Err(format!("{what} is {}", objects.type_name(value))),
        },
        Value::None => Ok(0),
        _ => Err(format!("{what} is {}", objects.type_name(value))),
    }
}

/// Something counted: not negative.
pub fn count(objects: &Objects, value: Value, what: &str) -> Result<u64, String> {
    match value {
        Value::Int(number) => u64::try_from(number).map_err(|_| format!("{what} is negative: {number}")),
        _ => Err(format!("{what} is {}", objects.type_name(value))),
    }
}

/// A size of memory.
pub fn bytes(objects: &Objects, value: Value, what: &str) -> Result<u64, String> {
    let size = count(objects, value, what)?;
    if size > MOST { Err(format!("{what} is more than any device has: {size}")) } else { Ok(size) }
}
