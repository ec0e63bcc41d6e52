//! Reads a pickle (protocols 2 to 5) of plain data. It executes nothing: an opcode that would look up or
//! call something is an error that names it.
//!
//! Must not know: snapshots. A [`Sink`] may take list items over as they come.
//! Invariant: no recursion, and memory is bounded by the bytes that were read.

use super::error::{Error, Result};
use super::input::Input;
use super::objects::{Id, Memo, Objects, Shape, TooMany, Value};
use std::io::Read;

/// More values at once than Python's own pickler ever leaves open (it writes batches of 1000).
const MAX_STACK: usize = 1 << 22;
const MAX_MARKS: usize = 1 << 16;
/// How much of a foreign name is repeated in a message.
const NAME: usize = 200;

/// Takes over list items while the pickle is read, so that they need not be kept as values.
pub trait Sink {
    /// `items` are about to be put at the end of `list`. True: they were taken (with [`Objects::take`],
    /// as `list` itself must be); false: the list shall hold them. The items are complete.
    fn append(&mut self, objects: &mut Objects, list: Id, items: &[Value]) -> Result<bool, String>;
}

/// Takes nothing over.
pub struct KeepAll;

impl Sink for KeepAll {
    fn append(&mut self, _: &mut Objects, _: Id, _: &[Value]) -> Result<bool, String> {
        Ok(false)
    }
}

mod op {
    pub const MARK: u8 = b'(';
    pub const STOP: u8 = b'.';
    pub const POP: u8 = b'0';
    pub const POP_MARK: u8 = b'1';
    pub const DUP: u8 = b'2';
    pub const BINBYTES: u8 = b'B';
    pub const SHORT_BINBYTES: u8 = b'C';
    pub const BINFLOAT: u8 = b'G';
    pub const BININT: u8 = b'J';
    pub const BININT1: u8 = b'K';
    pub const BININT2: u8 = b'M';
    pub const NONE: u8 = b'N';
    pub const BINUNICODE: u8 = b'X';
    pub const EMPTY_LIST: u8 = b']';
    pub const APPEND: u8 = b'a';
    pub const DICT: u8 = b'd';
    pub const APPENDS: u8 = b'e';
    pub const BINGET: u8 = b'h';
    pub const LONG_BINGET: u8 = b'j';
    pub const LIST: u8 = b'l';
    pub const BINPUT: u8 = b'q';
    pub const LONG_BINPUT: u8 = b'r';
    pub const SETITEM: u8 = b's';
    pub const TUPLE: u8 = b't';
    pub const EMPTY_TUPLE: u8 = b')';
    pub const SETITEMS: u8 = b'u';
    pub const EMPTY_DICT: u8 = b'}';
    pub const PROTO: u8 = 0x80;
    pub const TUPLE1: u8 = 0x85;
    pub const TUPLE2: u8 = 0x86;
    pub const TUPLE3: u8 = 0x87;
    pub const NEWTRUE: u8 = 0x88;
    pub const NEWFALSE: u8 = 0x89;
    pub const LONG1: u8 = 0x8a;
    pub const LONG4: u8 = 0x8b;
    pub const SHORT_BINUNICODE: u8 = 0x8c;
    pub const BINUNICODE8: u8 = 0x8d;
    pub const BINBYTES8: u8 = 0x8e;
    pub const MEMOIZE: u8 = 0x94;
    pub const FRAME: u8 = 0x95;

    pub const GLOBAL: u8 = b'c';
    pub const INST: u8 = b'i';
    pub const STACK_GLOBAL: u8 = 0x93;

    /// The name of an opcode that this reader refuses, and what it would do.
    pub fn refused(code: u8) -> Option<(&'static str, &'static str)> {
        Some(match code {
            b'R' => ("REDUCE", "it wants to call a function"),
            b'b' => ("BUILD", "it wants to call an object's __setstate__"),
            b'o' => ("OBJ", "it wants to call a class"),
            b'P' => ("PERSID", "it wants to call a persistent loader"),
            b'Q' => ("BINPERSID", "it wants to call a persistent loader"),
            0x81 => ("NEWOBJ", "it wants to call a class"),
            0x82 => ("EXT1", "it wants to call what the extension registry holds"),
            0x83 => ("EXT2", "it wants to call what the extension registry holds"),
            0x84 => ("EXT4", "it wants to call what the extension registry holds"),
            0x92 => ("NEWOBJ_EX", "it wants to call a class"),
            0x8f => ("EMPTY_SET", "it holds a set"),
            0x90 => ("ADDITEMS", "it holds a set"),
            0x91 => ("FROZENSET", "it holds a frozenset"),
            0x96 => ("BYTEARRAY8", "it holds a bytearray"),
            0x97 => ("NEXT_BUFFER", "it wants an out-of-band buffer"),
            0x98 => ("READONLY_BUFFER", "it wants an out-of-band buffer"),
            b'F' => ("FLOAT", "it is of protocol 0 or 1; protocols 2 to 5 are read"),
            b'I' => ("INT", "it is of protocol 0 or 1; protocols 2 to 5 are read"),
            b'L' => ("LONG", "it is of protocol 0 or 1; protocols 2 to 5 are read"),
            b'S' => ("STRING", "it is of protocol 0 or 1, or of Python 2"),
            b'T' => ("BINSTRING", "it was written by Python 2"),
            b'U' => ("SHORT_BINSTRING", "it was written by Python 2"),
            b'V' => ("UNICODE", "it is of protocol 0 or 1; protocols 2 to 5 are read"),
            b'g' => ("GET", "it is of protocol 0 or 1; protocols 2 to 5 are read"),
            b'p' => ("PUT", "it is of protocol 0 or 1; protocols 2 to 5 are read"),
            _ => return None,
        })
    }
}

/// Reads one pickle; returns the objects and the root among them.
pub fn read<R: Read, S: Sink>(input: &mut Input<R>, sink: &mut S) -> Result<(Objects, Value)> {
    let mut machine = Machine {
        objects: Objects::default(),
        memo: Memo::default(),
        stack: Vec::new(),
        marks: Vec::new(),
        scratch: Vec::new(),
        start: 0,
        sink,
    };
    let root = machine.run(input)?;
    Ok((machine.objects, root))
}

struct Machine<'s, S> {
    objects: Objects,
    memo: Memo,
    stack: Vec<Value>,
    /// Heights of the stack at which a MARK was set.
    marks: Vec<usize>,
    scratch: Vec<u8>,
    /// Where the opcode at hand begins.
    start: u64,
    sink: &'s mut S,
}

impl<S: Sink> Machine<'_, S> {
    fn run<R: Read>(&mut self, input: &mut Input<R>) -> Result<Value> {
        const WITHIN: &str = "a pickle's opcode";
        loop {
            self.start = input.offset();
            match input.byte("a pickle")? {
                op::BINGET => {
                    let number = input.byte(WITHIN)?;
                    self.get(number.into())?;
                }
                op::LONG_BINGET => {
                    let number = u32::from_le_bytes(input.array(WITHIN)?);
                    self.get(number)?;
                }
                op::MEMOIZE => {
                    let number = u32::try_from(self.memo.next()).map_err(|_| self.many(TooMany))?;
                    self.put(number)?;
                }
                op::BINPUT => {
                    let number = input.byte(WITHIN)?;
                    self.put(number.into())?;
                }
                op::LONG_BINPUT => {
                    let number = u32::from_le_bytes(input.array(WITHIN)?);
                    self.put(number)?;
                }
                op::BININT1 => {
                    let value = input.byte(WITHIN)?;
                    self.push(Value::Int(value.into()))?;
                }
                op::BININT2 => {
                    let value = u16::from_le_bytes(input.array(WITHIN)?);
                    self.push(Value::Int(value.into()))?;
                }
                op::BININT => {
                    let value = i32::from_le_bytes(input.array(WITHIN)?);
                    self.push(Value::Int(value.into()))?;
                }
                op::LONG1 => {
                    let length = input.byte(WITHIN)?;
                    self.long(input, length.into())?;
                }
                op::LONG4 => {
                    let length = i32::from_le_bytes(input.array(WITHIN)?);
                    let length = u64::try_from(length).map_err(|_| self.bad("an int of negative length"))?;
                    self.long(input, length)?;
                }
                op::BINFLOAT => {
                    let value = f64::from_be_bytes(input.array(WITHIN)?);
                    self.push(Value::Float(value))?;
                }
                op::NONE => self.push(Value::None)?,
                op::NEWTRUE => self.push(Value::Bool(true))?,
                op::NEWFALSE => self.push(Value::Bool(false))?,
                op::SHORT_BINUNICODE => {
                    let length = input.byte(WITHIN)?;
                    self.text(input, length.into())?;
                }
                op::BINUNICODE => {
                    let length = u32::from_le_bytes(input.array(WITHIN)?);
                    self.text(input, length.into())?;
                }
                op::BINUNICODE8 => {
                    let length = u64::from_le_bytes(input.array(WITHIN)?);
                    self.text(input, length)?;
                }
                op::SHORT_BINBYTES => {
                    let length = input.byte(WITHIN)?;
                    self.bytes(input, length.into())?;
                }
                op::BINBYTES => {
                    let length = u32::from_le_bytes(input.array(WITHIN)?);
                    self.bytes(input, length.into())?;
                }
                op::BINBYTES8 => {
                    let length = u64::from_le_bytes(input.array(WITHIN)?);
                    self.bytes(input, length)?;
                }
                op::EMPTY_LIST => self.list(&[])?,
                op::EMPTY_DICT => self.dict()?,
                op::EMPTY_TUPLE => self.tuple(0)?,
                op::TUPLE1 => self.tuple(1)?,
                op::TUPLE2 => self.tuple(2)?,
                op::TUPLE3 => self.tuple(3)?,
                op::TUPLE => {
                    let from = self.mark()?;
                    self.tuple(self.stack.len() - from)?;
                }
                op::LIST => {
                    let from = self.mark()?;
                    let items = self.stack.split_off(from);
                    self.list(&items)?;
                }
                op::DICT => {
                    let from = self.mark()?;
                    let items = self.stack.split_off(from);
                    self.dict()?;
                    let from = self.stack.len();
                    self.stack.extend(items);
                    self.set_items(from)?;
                }
                op::APPEND => {
                    self.need(1)?;
                    self.append(self.stack.len() - 1)?;
                }
                op::APPENDS => {
                    let from = self.mark()?;
                    self.append(from)?;
                }
                op::SETITEM => {
                    self.need(2)?;
                    self.set_items(self.stack.len() - 2)?;
                }
                op::SETITEMS => {
                    let from = self.mark()?;
                    self.set_items(from)?;
                }
                op::MARK => {
                    if self.marks.len() >= MAX_MARKS {
                        return Err(self.bad("it is nested more than 65536 deep"));
                    }
                    self.marks.push(self.stack.len());
                }
                op::POP => match self.marks.last() {
                    Some(mark) if *mark == self.stack.len() => {
                        self.marks.pop();
                    }
                    _ => {
                        self.pop()?;
                    }
                },
                op::POP_MARK => {
                    let from = self.mark()?;
                    self.stack.truncate(from);
                }
                op::DUP => {
                    let value = self.top()?;
                    self.push(value)?;
                }
                op::PROTO => {
                    let protocol = input.byte(WITHIN)?;
                    if protocol > 5 {
                        return Err(self.bad(format!("pickle protocol {protocol} is not known (2 to 5 are)")));
                    }
                }
                op::FRAME => {
                    // Only a promise of how many bytes follow; opcodes end where they end.
                    input.array::<8>(WITHIN)?;
                }
                op::STOP => {
                    let root = self.pop()?;
                    return if self.stack.is_empty() && self.marks.is_empty() {
                        Ok(root)
                    } else {
                        Err(self.bad("the pickle stops before it is complete"))
                    };
                }
                code => return Err(self.refuse(input, code)),
            }
        }
    }

    fn bad(&self, what: impl Into<String>) -> Error {
        Error::Corrupt { offset: self.start, what: what.into() }
    }

    fn many(&self, TooMany: TooMany) -> Error {
        self.bad("more objects than can be numbered")
    }

    #[inline]
    fn push(&mut self, value: Value) -> Result<()> {
        if self.stack.len() >= MAX_STACK {
            return Err(self.bad("more values are open at once than any pickler leaves open"));
        }
        self.stack.push(value);
        Ok(())
    }

    /// The height of the innermost mark or, without one, of the whole stack.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    /// Fails unless `count` values lie above the innermost mark.
    #[inline]
    fn need(&self, count: usize) -> Result<()> {
        if self.stack.len() < self.floor() + count {
            return Err(self.bad("an opcode lacks the values it works on"));
        }
        Ok(())
    }

    fn pop(&mut self) -> Result<Value> {
        self.need(1)?;
        self.stack.pop().ok_or_else(|| self.bad("nothing to take away"))
    }

    fn top(&self) -> Result<Value> {
        self.need(1)?;
        self.stack.last().copied().ok_or_else(|| self.bad("nothing to name"))
    }

    fn mark(&mut self) -> Result<usize> {
        self.marks.pop().ok_or_else(|| self.bad("an opcode lacks its MARK"))
    }

    #[inline]
    fn get(&mut self, number: u32) -> Result<()> {
        match self.memo.get(number) {
            Some(value) => self.push(value),
            None => Err(self.bad(format!("it names memo {number}, which was never set"))),
        }
    }

    #[inline]
    fn put(&mut self, number: u32) -> Result<()> {
        let value = self.top()?;
        self.memo.put(number, value);
        Ok(())
    }

    #[inline]
    fn long<R: Read>(&mut self, input: &mut Input<R>, length: u64) -> Result<()> {
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        input.append_to(length, &mut bytes, "an int")?;
        // Bytes that only repeat the sign say nothing.
        while let [.., before, last] = bytes[..]
            && (last == 0 && before < 0x80 || last == 0xff && before >= 0x80)
        {
            bytes.pop();
        }
        let value = if bytes.len() <= 8 {
            let sign = if bytes.last().is_some_and(|last| *last >= 0x80) { 0xff } else { 0 };
            let mut all = [sign; 8];
            all[..bytes.len()].copy_from_slice(&bytes);
            Value::Int(i64::from_le_bytes(all))
        } else {
            self.objects.new_big_int(bytes.clone()).map_err(|e| self.many(e))?
        };
        self.scratch = bytes;
        self.push(value)
    }

    fn text<R: Read>(&mut self, input: &mut Input<R>, length: u64) -> Result<()> {
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        input.append_to(length, &mut bytes, "a str")?;
        // Python writes lone surrogates (undecodable file names), which no Rust string can hold.
        let value = self.objects.new_text(&String::from_utf8_lossy(&bytes)).map_err(|e| self.many(e))?;
        self.scratch = bytes;
        self.push(value)
    }

    fn bytes<R: Read>(&mut self, input: &mut Input<R>, length: u64) -> Result<()> {
        let mut bytes = Vec::new();
        input.append_to(length, &mut bytes, "bytes")?;
        let value = self.objects.new_bytes(bytes).map_err(|e| self.many(e))?;
        self.push(value)
    }

    fn list(&mut self, items: &[Value]) -> Result<()> {
        let value = self.objects.new_list(items).map_err(|e| self.many(e))?;
        self.push(value)
    }

    fn dict(&mut self) -> Result<()> {
        let value = self.objects.new_dict().map_err(|e| self.many(e))?;
        self.push(value)
    }

    /// The last `count` values become a tuple.
    fn tuple(&mut self, count: usize) -> Result<()> {
        self.need(count)?;
        let from = self.stack.len() - count;
        let value = self.objects.new_tuple(&self.stack[from..]).map_err(|e| self.many(e))?;
        self.stack.truncate(from);
        self.push(value)
    }

    /// The container below height `from`.
    fn below(&self, from: usize) -> Result<Id> {
        match from.checked_sub(1).filter(|at| *at >= self.floor()).and_then(|at| self.stack.get(at)) {
            Some(Value::Object(id)) => Ok(*id),
            _ => Err(self.bad("items without the list or dict they belong to")),
        }
    }

    /// The values from height `from` are put at the end of the list below them.
    fn append(&mut self, from: usize) -> Result<()> {
        let list = self.below(from)?;
        if !matches!(self.objects.get(list), Shape::List(_) | Shape::Taken(_)) {
            return Err(self.bad("items are appended to something that is no list"));
        }
        let items = &self.stack[from..];
        let taken = self.sink.append(&mut self.objects, list, items);
        if !taken.map_err(|what| self.bad(what))? && !self.objects.extend_list(list, &self.stack[from..]) {
            return Err(self.bad("a list changes after it was complete"));
        }
        self.stack.truncate(from);
        Ok(())
    }

    /// Keys and values from height `from` are put into the dict below them.
    fn set_items(&mut self, from: usize) -> Result<()> {
        let dict = self.below(from)?;
        if !(self.stack.len() - from).is_multiple_of(2) {
            return Err(self.bad("a key without its value"));
        }
        if !self.objects.extend_dict(dict, &self.stack[from..]) {
            return Err(self.bad("keys are set in something that is no dict"));
        }
        self.stack.truncate(from);
        Ok(())
    }

    /// Why `code` is not read.
    #[cold]
    fn refuse<R: Read>(&self, input: &mut Input<R>, code: u8) -> Error {
        let called = match code {
            op::GLOBAL | op::INST => {
                let name = |line: Result<Vec<u8>>| {
                    line.map(|l| String::from_utf8_lossy(&l).escape_debug().to_string()).unwrap_or_default()
                };
                let module = name(input.line(NAME, "a name"));
                let name = name(input.line(NAME, "a name"));
                Some((if code == op::GLOBAL { "GLOBAL" } else { "INST" }, module, name))
            }
            op::STACK_GLOBAL => {
                let name = |value: Option<&Value>| match value {
                    Some(Value::Str(text)) => self
                        .objects
                        .text(*text)
                        .chars()
                        .take(NAME)
                        .collect::<String>()
                        .escape_debug()
                        .to_string(),
                    _ => "?".to_owned(),
                };
                let mut top = self.stack.iter().rev();
                let last = name(top.next());
                Some(("STACK_GLOBAL", name(top.next()), last))
            }
            _ => None,
        };
        let start = self.start;
        if let Some((opcode, module, name)) = called {
            return Error::Foreign(format!("it wants to call {module}.{name} ({opcode} at byte {start})"));
        }
        match op::refused(code) {
            Some((opcode, why)) => Error::Foreign(format!("{why} ({opcode} at byte {start})")),
            None if start == 0 => Error::Foreign(format!("no pickle begins with the byte {code:#04x}")),
            None => self.bad(format!("{code:#04x} is no opcode of a pickle")),
        }
    }
}
