//! pprof's profile.proto, gzipped: the sample types of a heap profile, so that every pprof tool knows them.
//!
//! Must not know: files.
//! Invariant: string 0 is empty; locations and functions are numbered from 1; a sample's values stand in the
//! order of the sample types.
//!
//! Field numbers are those of github.com/google/pprof/blob/main/proto/profile.proto.

use super::folded;
use super::model::Report;
use crate::ledger::Frame;
use std::collections::HashMap;
use std::io::Write;

/// A protobuf message that is being written.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(&mut self, field: u32, value: u64) {
        if value != 0 {
            self.varint(u64::from(field) << 3);
            self.varint(value);
        }
    }

    fn bytes(&mut self, field: u32, value: &[u8]) {
        self.varint(u64::from(field) << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn message(&mut self, field: u32, value: &Message) {
        self.bytes(field, &value.0);
    }

    fn packed(&mut self, field: u32, values: impl IntoIterator<Item = u64>) {
        let mut inner = Message::default();
        values.into_iter().for_each(|value| inner.varint(value));
        self.message(field, &inner);
    }
}

/// Each text once, by its number.
struct Texts {
    list: Vec<String>,
    numbers: HashMap<String, u64>,
}

impl Texts {
    fn number(&mut self, text: &str) -> u64 {
        if let Some(&number) = self.numbers.get(text) {
            return number;
        }
        let number = self.list.len() as u64;
        self.list.push(text.to_owned());
        self.numbers.insert(text.to_owned(), number);
        number
    }
}

/// Locations (a line of a function) and functions, each once.
#[derive(Default)]
struct Code {
    functions: HashMap<(u64, u64), u64>,
    locations: HashMap<(u64, u32), u64>,
    function_messages: Vec<Message>,
    location_messages: Vec<Message>,
}

impl Code {
    fn location(&mut self, frame: &Frame, texts: &mut Texts) -> u64 {
        let (name, file) = (texts.number(&frame.function), texts.number(&frame.file));
        let next = self.functions.len() as u64 + 1;
        let messages = &mut self.function_messages;
        let function = *self.functions.entry((name, file)).or_insert_with(|| {
            let mut message = Message::default();
            message.number(1, next);
            message.number(2, name);
            message.number(3, name);
            message.number(4, file);
            messages.push(message);
            next
        });
        let next = self.locations.len() as u64 + 1;
        let messages = &mut self.location_messages;
        *self.locations.entry((function, frame.line)).or_insert_with(|| {
            let mut line = Message::default();
            line.number(1, function);
            line.number(2, u64::from(frame.line));
            let mut message = Message::default();
            message.number(1, next);
            message.message(4, &line);
            messages.push(message);
            next
        })
    }
}

/// The profile, not yet compressed.
pub fn encode(report: &Report) -> Vec<u8> {
    let mut texts = Texts { list: vec![String::new()], numbers: HashMap::from([(String::new(), 0)]) };
    let mut code = Code::default();
    let mut profile = Message::default();
    let types = [
        ("alloc_objects", "count"),
        ("alloc_space", "bytes"),
        ("inuse_objects", "count"),
        ("inuse_space", "bytes"),
    ];
    for (kind, unit) in types {
        let mut value_type = Message::default();
        value_type.number(1, texts.number(kind));
        value_type.number(2, texts.number(unit));
        profile.message(1, &value_type);
    }
    for site in &report.sites {
        let stack: Vec<u64> = site.stack.iter().map(|frame| code.location(frame, &mut texts)).collect();
        let mut sample = Message::default();
        sample.packed(1, stack);
        sample.packed(2, [site.allocated_blocks, site.allocated_bytes, site.live_blocks, site.live_bytes]);
        for (key, value) in [("device", folded::device(site.device)), ("phase", site.phase.clone())] {
            if value.is_empty() {
                continue;
            }
            let mut label = Message::default();
            label.number(1, texts.number(key));
            label.number(2, texts.number(&value));
            sample.message(3, &label);
        }
        profile.message(2, &sample);
    }
    for location in &code.location_messages {
        profile.message(4, location);
    }
    for function in &code.function_messages {
        profile.message(5, function);
    }
    let comment = texts.number(&format!("strandline {}: {}", env!("CARGO_PKG_VERSION"), report.reason));
    let default = texts.number("inuse_space");
    for text in &texts.list {
        profile.bytes(6, text.as_bytes());
    }
    profile.number(9, report.run.time.unwrap_or(0).saturating_mul(1_000_000_000));
    profile.packed(13, [comment]);
    profile.number(14, default);
    profile.0
}

/// The profile as pprof's tools read it.
pub fn gzipped(report: &Report) -> std::io::Result<Vec<u8>> {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gz.write_all(&encode(report))?;
    gz.finish()
}
