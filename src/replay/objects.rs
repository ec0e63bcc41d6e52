//! What a pickle holds: values, and the containers and strings that they name by number.
//!
//! Must not know: opcodes, snapshots.
//! Invariant: a container that was taken keeps 8 bytes and a token; its storage serves the next container.
//! Nothing here is recursive, so neither depth nor cycles can exhaust the stack.

use hashbrown::HashTable;
use std::hash::BuildHasher;

/// The number of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Id(u32);

/// The number of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Text(u32);

/// A Python value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(Text),
    Object(Id),
}

/// A container (or a large scalar), looked up by [`Id`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape<'a> {
    List(&'a [Value]),
    Tuple(&'a [Value]),
    Dict(&'a [(Value, Value)]),
    Bytes(&'a [u8]),
    /// An integer beyond 64 bits: two's complement, least byte first.
    BigInt(&'a [u8]),
    /// What [`Objects::take`] left.
    Taken(u32),
}

#[derive(Clone, Copy)]
enum Object {
    List(u32),
    Tuple(u32),
    Dict(u32),
    Bytes(u32),
    BigInt(u32),
    Taken(u32),
}

/// The number space is used up.
#[derive(Debug)]
pub struct TooMany;

/// Storage that is used again.
struct Slab<T> {
    slots: Vec<Vec<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    fn put(&mut self, items: impl Iterator<Item = T>) -> u32 {
        match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize].extend(items);
                slot
            }
            None => {
                self.slots.push(items.collect());
                (self.slots.len() - 1) as u32
            }
        }
    }

    fn clear(&mut self, slot: u32) {
        self.slots[slot as usize].clear();
        self.free.push(slot);
    }
}

/// All containers and strings of one pickle.
pub struct Objects {
    objects: Vec<Object>,
    sequences: Slab<Value>,
    dicts: Slab<(Value, Value)>,
    bytes: Vec<Box<[u8]>>,
    texts: Vec<Box<str>>,
    index: HashTable<u32>,
    hasher: foldhash::fast::FixedState,
}

impl Default for Objects {
    fn default() -> Objects {
        Objects {
            objects: Vec::new(),
            sequences: Slab { slots: Vec::new(), free: Vec::new() },
            dicts: Slab { slots: Vec::new(), free: Vec::new() },
            bytes: Vec::new(),
            texts: Vec::new(),
            index: HashTable::new(),
            hasher: foldhash::fast::FixedState::default(),
        }
    }
}

impl Objects {
    fn push(&mut self, object: Object) -> Result<Value, TooMany> {
        // The highest bit of a number is the memo's.
        let id = u32::try_from(self.objects.len()).ok().filter(|id| *id < 1 << 31).ok_or(TooMany)?;
        self.objects.push(object);
        Ok(Value::Object(Id(id)))
    }

    pub fn new_list(&mut self, items: &[Value]) -> Result<Value, TooMany> {
        let slot = self.sequences.put(items.iter().copied());
        self.push(Object::List(slot))
    }

    pub fn new_tuple(&mut self, items: &[Value]) -> Result<Value, TooMany> {
        let slot = self.sequences.put(items.iter().copied());
        self.push(Object::Tuple(slot))
    }

    pub fn new_dict(&mut self) -> Result<Value, TooMany> {
        let slot = self.dicts.put(std::iter::empty());
        self.push(Object::Dict(slot))
    }

    pub fn new_bytes(&mut self, bytes: Vec<u8>) -> Result<Value, TooMany> {
        self.bytes.push(bytes.into_boxed_slice());
        self.push(Object::Bytes((self.bytes.len() - 1) as u32))
    }

    pub fn new_big_int(&mut self, bytes: Vec<u8>) -> Result<Value, TooMany> {
        self.bytes.push(bytes.into_boxed_slice());
        self.push(Object::BigInt((self.bytes.len() - 1) as u32))
    }

    /// The string `text`; equal strings have one number.
    pub fn new_text(&mut self, text: &str) -> Result<Value, TooMany> {
        let hash = self.hasher.hash_one(text);
        if let Some(known) = self.index.find(hash, |known| &*self.texts[*known as usize] == text) {
            return Ok(Value::Str(Text(*known)));
        }
        let number =
            u32::try_from(self.texts.len()).ok().filter(|id| *id < i32::MAX as u32).ok_or(TooMany)?;
        self.texts.push(text.into());
        let (texts, hasher) = (&self.texts, &self.hasher);
        self.index.insert_unique(hash, number, |known| hasher.hash_one(&*texts[*known as usize]));
        Ok(Value::Str(Text(number)))
    }

    pub fn text(&self, text: Text) -> &str {
        &self.texts[text.0 as usize]
    }

    pub fn get(&self, id: Id) -> Shape<'_> {
        match self.objects[id.0 as usize] {
            Object::List(slot) => Shape::List(&self.sequences.slots[slot as usize]),
            Object::Tuple(slot) => Shape::Tuple(&self.sequences.slots[slot as usize]),
            Object::Dict(slot) => Shape::Dict(&self.dicts.slots[slot as usize]),
            Object::Bytes(slot) => Shape::Bytes(&self.bytes[slot as usize]),
            Object::BigInt(slot) => Shape::BigInt(&self.bytes[slot as usize]),
            Object::Taken(token) => Shape::Taken(token),
        }
    }

    /// Adds to a list; false if `id` is none (any more).
    pub fn extend_list(&mut self, id: Id, items: &[Value]) -> bool {
        let Object::List(slot) = self.objects[id.0 as usize] else { return false };
        self.sequences.slots[slot as usize].extend_from_slice(items);
        true
    }

    /// Adds keys and values, which alternate in `pairs`, to a dict; false if `id` is none (any more).
    pub fn extend_dict(&mut self, id: Id, pairs: &[Value]) -> bool {
        let Object::Dict(slot) = self.objects[id.0 as usize] else { return false };
        self.dicts.slots[slot as usize].extend(pairs.chunks_exact(2).map(|pair| (pair[0], pair[1])));
        true
    }

    /// Frees what a container holds and leaves `token` in its place.
    pub fn take(&mut self, id: Id, token: u32) {
        match std::mem::replace(&mut self.objects[id.0 as usize], Object::Taken(token)) {
            Object::List(slot) | Object::Tuple(slot) => self.sequences.clear(slot),
            Object::Dict(slot) => self.dicts.clear(slot),
            Object::Bytes(_) | Object::BigInt(_) | Object::Taken(_) => {}
        }
    }

    /// The items of a list or tuple.
    pub fn sequence(&self, value: Value) -> Option<&[Value]> {
        match value {
            Value::Object(id) => match self.get(id) {
                Shape::List(items) | Shape::Tuple(items) => Some(items),
                _ => None,
            },
            _ => None,
        }
    }

    /// The items of a dict.
    pub fn dict(&self, value: Value) -> Option<&[(Value, Value)]> {
        match value {
            Value::Object(id) => match self.get(id) {
                Shape::Dict(items) => Some(items),
                _ => None,
            },
            _ => None,
        }
    }

    /// What Python calls the type of `value`.
    pub fn type_name(&self, value: Value) -> &'static str {
        match value {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) => "an int",
            Value::Float(_) => "a float",
            Value::Str(_) => "a str",
            Value::Object(id) => match self.get(id) {
                Shape::List(_) => "a list",
                Shape::Tuple(_) => "a tuple",
                Shape::Dict(_) => "a dict",
                Shape::Bytes(_) => "bytes",
                Shape::BigInt(_) => "an int of more than 64 bits",
                Shape::Taken(_) => "a list or dict",
            },
        }
    }
}

/// What was put aside under a number, to be named again: 4 bytes each.
#[derive(Default)]
pub struct Memo {
    dense: Vec<u32>,
    /// Numbers that do not follow one upon the other, and values that are neither string nor container
    /// (a hole in `dense`).
    sparse: hashbrown::HashMap<u32, Value>,
    /// How many of `sparse` lie beyond `dense`.
    beyond: usize,
}

const TEXT: u32 = 1 << 31;
const HOLE: u32 = u32::MAX;

impl Memo {
    /// The number that the next MEMOIZE gives.
    pub fn next(&self) -> usize {
        self.dense.len() + self.beyond
    }

    pub fn put(&mut self, number: u32, value: Value) {
        let at = number as usize;
        if at > self.dense.len() {
            self.beyond += usize::from(self.sparse.insert(number, value).is_none());
            return;
        }
        if at == self.dense.len() {
            self.beyond -= usize::from(self.beyond > 0 && self.sparse.remove(&number).is_some());
            self.dense.push(HOLE);
        }
        self.dense[at] = match value {
            Value::Object(Id(id)) => id,
            Value::Str(Text(text)) => text | TEXT,
            _ => {
                self.sparse.insert(number, value);
                HOLE
            }
        };
    }

    pub fn get(&self, number: u32) -> Option<Value> {
        match self.dense.get(number as usize) {
            None | Some(&HOLE) => self.sparse.get(&number).copied(),
            Some(&packed) if packed & TEXT == 0 => Some(Value::Object(Id(packed))),
            Some(&packed) => Some(Value::Str(Text(packed & !TEXT))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_of_taken_containers_is_used_again() {
        let mut objects = Objects::default();
        for token in 0..1000 {
            let Value::Object(id) = objects.new_dict().unwrap() else { unreachable!() };
            assert!(objects.extend_dict(id, &[Value::None, Value::Int(token)]));
            objects.take(id, token as u32);
            assert_eq!(objects.get(id), Shape::Taken(token as u32));
            assert!(!objects.extend_dict(id, &[Value::None, Value::None]));
        }
        assert_eq!(objects.dicts.slots.len(), 1);
        assert_eq!(size_of::<Object>(), 8);
        assert_eq!(size_of::<Value>(), 16);
    }

    #[test]
    fn memo_holds_any_number_in_little_room() {
        let mut memo = Memo::default();
        memo.put(u32::MAX, Value::Str(Text(7)));
        memo.put(0, Value::Object(Id(3)));
        memo.put(1, Value::Int(5));
        memo.put(0, Value::Object(Id(4)));
        assert_eq!(memo.get(u32::MAX), Some(Value::Str(Text(7))));
        assert_eq!(memo.get(0), Some(Value::Object(Id(4))));
        assert_eq!(memo.get(1), Some(Value::Int(5)));
        assert_eq!(memo.get(2), None);
        assert_eq!(memo.next(), 3);
        memo.put(1, Value::Str(Text(9)));
        assert_eq!(memo.get(1), Some(Value::Str(Text(9))));
        assert!(memo.dense.capacity() < 100);
    }
}
