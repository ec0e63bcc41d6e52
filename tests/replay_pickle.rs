//! The pickle reader: every opcode, what real Python writes, and what an enemy writes.

use proptest::prelude::*;
use std::io::Write;
use std::process::{Command, Stdio};
use strandline::replay::error::Error;
use strandline::replay::input::Input;
use strandline::replay::objects::{Objects, Shape, Value};
use strandline::replay::pickle::{self, KeepAll};

/// A Python value of its own.
#[derive(Clone, Debug, PartialEq)]
enum Py {
    None,
    Bool(bool),
    Int(i128),
    Float(u64),
    Str(String),
    Bytes(Vec<u8>),
    List(Vec<Py>),
    Tuple(Vec<Py>),
    Dict(Vec<(Py, Py)>),
}

fn read(bytes: &[u8]) -> Result<Py, Error> {
    let mut input = Input::new(bytes);
    let (objects, root) = pickle::read(&mut input, &mut KeepAll)?;
    Ok(unfold(&objects, root, 0))
}

fn unfold(objects: &Objects, value: Value, depth: usize) -> Py {
    assert!(depth < 200, "too deep for this test");
    let all = |items: &[Value]| items.iter().map(|item| unfold(objects, *item, depth + 1)).collect();
    match value {
        Value::None => Py::None,
        Value::Bool(value) => Py::Bool(value),
        Value::Int(value) => Py::Int(value.into()),
        Value::Float(value) => Py::Float(value.to_bits()),
        Value::Str(text) => Py::Str(objects.text(text).to_owned()),
        Value::Object(id) => match objects.get(id) {
            Shape::List(items) => Py::List(all(items)),
            Shape::Tuple(items) => Py::Tuple(all(items)),
            Shape::Dict(items) => Py::Dict(
                items
                    .iter()
                    .map(|(key, value)| {
                        (unfold(objects, *key, depth + 1), unfold(objects, *value, depth + 1))
                    })
                    .collect(),
            ),
            Shape::Bytes(bytes) => Py::Bytes(bytes.to_vec()),
            Shape::BigInt(bytes) => {
                let sign = if bytes.last().is_some_and(|last| *last >= 0x80) { 0xff } else { 0 };
                let mut all = [sign; 16];
                all[..bytes.len()].copy_from_slice(bytes);
                Py::Int(i128::from_le_bytes(all))
            }
            Shape::Taken(_) => panic!("nothing was taken"),
        },
    }
}

fn text(text: &str) -> Py {
    Py::Str(text.to_owned())
}

#[test]
fn every_opcode_is_read() {
    let int = Py::Int;
    let cases: Vec<(&[u8], Py)> = vec![
        (b"\x80\x04N.", Py::None),
        (b"\x80\x02\x88.", Py::Bool(true)),
        (b"\x80\x02\x89.", Py::Bool(false)),
        (b"K\xff.", int(255)),
        (b"M\x01\x02.", int(513)),
        (b"J\xff\xff\xff\xff.", int(-1)),
        (b"\x8a\x00.", int(0)),
        (b"\x8a\x01\xff.", int(-1)),
        (b"\x8a\x03\x00\x00\x01.", int(65536)),
        (b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00.", int(1 << 63)),
        (b"\x8a\x0a\x05\x00\x00\x00\x00\x00\x00\x00\x00\x00.", int(5)),
        (b"\x8b\x02\x00\x00\x00\x00\x80.", int(-32768)),
        (b"G\x3f\xf0\x00\x00\x00\x00\x00\x00.", Py::Float(1f64.to_bits())),
        (b"\x8c\x02hi.", text("hi")),
        (b"X\x02\x00\x00\x00hi.", text("hi")),
        (b"\x8d\x02\x00\x00\x00\x00\x00\x00\x00hi.", text("hi")),
        (b"C\x01\x00.", Py::Bytes(vec![0])),
        (b"B\x01\x00\x00\x00\x07.", Py::Bytes(vec![7])),
        (b"\x8e\x01\x00\x00\x00\x00\x00\x00\x00\x07.", Py::Bytes(vec![7])),
        (b"].", Py::List(vec![])),
        (b"].", Py::List(vec![])),
        (b"]K\x01a.", Py::List(vec![int(1)])),
        (b"](K\x01K\x02e.", Py::List(vec![int(1), int(2)])),
        (b"(K\x01K\x02l.", Py::List(vec![int(1), int(2)])),
        (b").", Py::Tuple(vec![])),
        (b"K\x01\x85.", Py::Tuple(vec![int(1)])),
        (b"K\x01K\x02\x86.", Py::Tuple(vec![int(1), int(2)])),
        (b"K\x01K\x02K\x03\x87.", Py::Tuple(vec![int(1), int(2), int(3)])),
        (b"(K\x01K\x02K\x03K\x04t.", Py::Tuple(vec![int(1), int(2), int(3), int(4)])),
        (b"}.", Py::Dict(vec![])),
        (b"}\x8c\x01aK\x01s.", Py::Dict(vec![(text("a"), int(1))])),
        (b"}(\x8c\x01aK\x01K\x02Nu.", Py::Dict(vec![(text("a"), int(1)), (int(2), Py::None)])),
        (b"(\x8c\x01aK\x01d.", Py::Dict(vec![(text("a"), int(1))])),
        (b"K\x012\x86.", Py::Tuple(vec![int(1), int(1)])),
        (b"K\x01K\x020.", int(1)),
        (b"K\x01(K\x02K\x031.", int(1)),
        (b"(0K\x01.", int(1)),
        (
            b"\x80\x04\x95\x04\x00\x00\x00\x00\x00\x00\x00]\x94h\x00\x86.",
            Py::Tuple(vec![Py::List(vec![]); 2]),
        ),
        (b"\x8c\x01a\x94\x8c\x01b\x94h\x00h\x01\x87.", Py::None),
        (b"\x8c\x01aq\x05h\x05\x86.", Py::Tuple(vec![text("a"), text("a")])),
        (b"\x8c\x01ar\xff\xff\xff\xffj\xff\xff\xff\xff\x86.", Py::Tuple(vec![text("a"), text("a")])),
        (b"K\x07\x94h\x00\x86.", Py::Tuple(vec![int(7), int(7)])),
    ];
    for (bytes, expected) in cases {
        if expected == Py::None && bytes[0] != 0x80 {
            // Four values, three taken: something is left over.
            assert!(matches!(read(bytes), Err(Error::Corrupt { .. })), "{bytes:?}");
            continue;
        }
        assert_eq!(read(bytes).unwrap(), expected, "{bytes:?}");
    }
}

#[test]
fn nothing_is_called() {
    let cases: &[(&[u8], &str)] = &[
        (b"cos\nsystem\n(S'echo'\ntR.", "it wants to call os.system (GLOBAL at byte 0)"),
        (
            b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93.",
            "it wants to call posix.system (STACK_GLOBAL at byte 19)",
        ),
        (b"(ios\nsystem\n.", "it wants to call os.system (INST at byte 1)"),
        (b"\x80\x02}R.", "it wants to call a function (REDUCE at byte 3)"),
        (b"\x80\x02}}b.", "it wants to call an object's __setstate__ (BUILD at byte 4)"),
        (b"\x80\x02}}\x81.", "it wants to call a class (NEWOBJ at byte 4)"),
        (b"\x80\x02}}\x92.", "it wants to call a class (NEWOBJ_EX at byte 4)"),
        (b"\x80\x02(o.", "it wants to call a class (OBJ at byte 3)"),
        (b"\x80\x02\x82\x01.", "it wants to call what the extension registry holds (EXT1 at byte 2)"),
        (b"\x80\x02KXQ.", "it wants to call a persistent loader (BINPERSID at byte 4)"),
        (b"cos\x1b[2J\nsys\xfftem\n", "it wants to call os\\u{1b}[2J.sys\u{fffd}tem (GLOBAL at byte 0)"),
        (b"\x93", "it wants to call ?.? (STACK_GLOBAL at byte 0)"),
        (b"I42\n.", "it is of protocol 0 or 1; protocols 2 to 5 are read (INT at byte 0)"),
        (b"\x80\x04\x8f.", "it holds a set (EMPTY_SET at byte 2)"),
        (b"~", "no pickle begins with the byte 0x7e"),
    ];
    for (bytes, message) in cases {
        assert_eq!(read(bytes).unwrap_err().to_string(), format!("is not a snapshot: {message}"));
    }
    // A name without end is not repeated in full.
    let mut long = b"c".to_vec();
    long.extend([b'a'; 100_000]);
    assert!(read(&long).unwrap_err().to_string().len() < 600);
}

#[test]
fn what_contradicts_itself_is_refused_with_its_place() {
    let cases: &[(&[u8], &str)] = &[
        (b".", "is corrupt at byte 0: an opcode lacks the values it works on"),
        (b"\x80\x09.", "is corrupt at byte 0: pickle protocol 9 is not known (2 to 5 are)"),
        (b"h\x00.", "is corrupt at byte 0: it names memo 0, which was never set"),
        (b"\x94.", "is corrupt at byte 0: an opcode lacks the values it works on"),
        (b"K\x01e.", "is corrupt at byte 2: an opcode lacks its MARK"),
        (b"K\x01(K\x02e.", "is corrupt at byte 5: items without the list or dict they belong to"),
        (b"(e.", "is corrupt at byte 1: items without the list or dict they belong to"),
        (b"}K\x01a.", "is corrupt at byte 3: items are appended to something that is no list"),
        (b"]K\x01K\x02s.", "is corrupt at byte 5: keys are set in something that is no dict"),
        (b"}(K\x01u.", "is corrupt at byte 4: a key without its value"),
        (b"K\x01K\x02.", "is corrupt at byte 4: the pickle stops before it is complete"),
        (b"]K\x01\xf0.", "is corrupt at byte 3: 0xf0 is no opcode of a pickle"),
        (b"\x8b\xff\xff\xff\xff.", "is corrupt at byte 0: an int of negative length"),
        (b"](K\x01\x86.", "is corrupt at byte 4: an opcode lacks the values it works on"),
    ];
    for (bytes, message) in cases {
        assert_eq!(read(bytes).unwrap_err().to_string(), *message, "{bytes:?}");
    }
}

#[test]
fn lengths_are_not_believed() {
    for head in [
        &b"X\xff\xff\xff\xff"[..],
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"B\xff\xff\xff\xff",
        b"\x8b\xff\xff\xff\x7f",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        let mut bytes = head.to_vec();
        bytes.extend(b"short");
        assert!(matches!(read(&bytes), Err(Error::Cut { .. } | Error::Foreign(_) | Error::Corrupt { .. })));
    }
}

#[test]
fn depth_is_harmless() {
    // A million lists, each in the one before.
    let mut bytes = vec![b']'; 1_000_000];
    bytes.extend(vec![b'a'; 999_999]);
    bytes.push(b'.');
    let mut input = Input::new(&bytes[..]);
    let (objects, _) = pickle::read(&mut input, &mut KeepAll).unwrap();
    drop(objects);
    let bytes = vec![b'('; 1_000_000];
    assert!(read(&bytes).unwrap_err().to_string().contains("nested more than"));
    let bytes = vec![b'N'; 10_000_000];
    assert!(read(&bytes).unwrap_err().to_string().contains("open at once"));
}

#[test]
fn a_bomb_of_memos_takes_no_more_room_than_its_bytes() {
    // Each list holds the one before ten times: 10^1000 items if anyone unfolded them.
    let mut bytes = b"\x80\x04]\x94".to_vec();
    for level in 0..1000u32 {
        bytes.extend(b"](");
        for _ in 0..10 {
            bytes.push(b'j');
            bytes.extend(level.to_le_bytes());
        }
        bytes.extend(b"e\x94");
    }
    bytes.push(b'.');
    // 1001 values stay open; take all but the last away.
    let stop = bytes.pop().unwrap();
    bytes.extend(b"\x85");
    bytes.push(stop);
    let mut input = Input::new(&bytes[..]);
    assert!(matches!(pickle::read(&mut input, &mut KeepAll), Err(Error::Corrupt { .. })));
}

/// Writes a value as Python's pickler would, with memos for strings.
fn write(value: &Py, out: &mut Vec<u8>, memo: &mut Vec<String>, protocol: u8) {
    match value {
        Py::None => out.push(b'N'),
        Py::Bool(value) => out.push(if *value { 0x88 } else { 0x89 }),
        Py::Int(value) => match *value {
            0..256 => out.extend([b'K', *value as u8]),
            256..65536 => {
                out.push(b'M');
                out.extend((*value as u16).to_le_bytes());
            }
            value if i32::try_from(value).is_ok() => {
                out.push(b'J');
                out.extend((value as i32).to_le_bytes());
            }
            value => {
                out.extend([0x8a, 16]);
                out.extend(value.to_le_bytes());
            }
        },
        Py::Float(bits) => {
            out.push(b'G');
            out.extend(bits.to_be_bytes());
        }
        Py::Str(text) => {
            if let Some(known) = memo.iter().position(|known| known == text) {
                out.push(b'j');
                out.extend((known as u32).to_le_bytes());
                return;
            }
            if protocol >= 4 && text.len() < 256 {
                out.extend([0x8c, text.len() as u8]);
            } else {
                out.push(b'X');
                out.extend((text.len() as u32).to_le_bytes());
            }
            out.extend(text.as_bytes());
            if protocol >= 4 {
                out.push(0x94);
            } else {
                out.push(b'r');
                out.extend((memo.len() as u32).to_le_bytes());
            }
            memo.push(text.clone());
        }
        Py::Bytes(bytes) => {
            out.push(b'B');
            out.extend((bytes.len() as u32).to_le_bytes());
            out.extend(bytes);
        }
        Py::List(items) => {
            out.extend(b"](");
            items.iter().for_each(|item| write(item, out, memo, protocol));
            out.push(b'e');
        }
        Py::Tuple(items) => {
            out.push(b'(');
            items.iter().for_each(|item| write(item, out, memo, protocol));
            out.push(b't');
        }
        Py::Dict(items) => {
            out.extend(b"}(");
            items.iter().for_each(|(key, value)| {
                write(key, out, memo, protocol);
                write(value, out, memo, protocol);
            });
            out.push(b'u');
        }
    }
}

fn values() -> impl Strategy<Value = Py> {
    let leaf = prop_oneof![
        Just(Py::None),
        any::<bool>().prop_map(Py::Bool),
        any::<i128>().prop_map(Py::Int),
        any::<i64>().prop_map(|value| Py::Int(value.into())),
        (-70_000i128..70_000).prop_map(Py::Int),
        any::<f64>().prop_filter("NaN has many forms", |f| !f.is_nan()).prop_map(|f| Py::Float(f.to_bits())),
        "[a-zé\u{1F600}]{0,8}".prop_map(Py::Str),
        "[a-z]{250,300}".prop_map(Py::Str),
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(Py::Bytes),
    ];
    leaf.prop_recursive(4, 60, 8, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..8).prop_map(Py::List),
            proptest::collection::vec(inner.clone(), 0..8).prop_map(Py::Tuple),
            proptest::collection::btree_map("[a-z]{0,6}", inner, 0..8).prop_map(|map| Py::Dict(
                map.into_iter().map(|(key, value)| (Py::Str(key), value)).collect()
            )),
        ]
    })
}

/// The value as a Python expression.
fn expression(value: &Py) -> String {
    let all = |items: &[Py]| items.iter().map(|item| expression(item) + ",").collect::<String>();
    match value {
        Py::None => "None".to_owned(),
        Py::Bool(value) => if *value { "True" } else { "False" }.to_owned(),
        Py::Int(value) => value.to_string(),
        Py::Float(bits) => format!("struct.unpack('>d', bytes.fromhex('{bits:016x}'))[0]"),
        Py::Str(text) => format!("bytes({:?}).decode()", text.as_bytes()),
        Py::Bytes(bytes) => format!("bytes({bytes:?})"),
        Py::List(items) => format!("[{}]", all(items)),
        Py::Tuple(items) => format!("({})", all(items)),
        Py::Dict(items) => {
            let items =
                items.iter().map(|(key, value)| format!("{}:{},", expression(key), expression(value)));
            format!("{{{}}}", items.collect::<String>())
        }
    }
}

proptest! {
    #[test]
    fn values_come_back(value in values(), protocol in 2u8..=5) {
        let mut bytes = vec![0x80, protocol];
        write(&value, &mut bytes, &mut Vec::new(), protocol);
        bytes.push(b'.');
        prop_assert_eq!(read(&bytes).unwrap(), value);
    }

    #[test]
    fn noise_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut input = Input::new(&bytes[..]);
        let _ = pickle::read(&mut input, &mut KeepAll);
    }

    #[test]
    fn spoiled_pickles_never_panic(value in values(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = vec![0x80, 4];
        write(&value, &mut bytes, &mut Vec::new(), 4);
        bytes.push(b'.');
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let mut input = Input::new(&bytes[..]);
        let _ = pickle::read(&mut input, &mut KeepAll);
    }
}

/// What real Python pickles; None where there is no Python.
fn python_pickles(values: &[Py], protocol: u8) -> Option<Vec<Vec<u8>>> {
    let list: String = values.iter().map(|value| expression(value) + ",\n").collect();
    let script = format!(
        "import pickle, struct, sys\nfor value in [\n{list}]:\n    data = pickle.dumps(value, protocol={protocol})\n    \
         sys.stdout.buffer.write(struct.pack('<Q', len(data)) + data)\n"
    );
    let mut python =
        Command::new("python3").arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().ok()?;
    let mut stdin = python.stdin.take()?;
    let writer = std::thread::spawn(move || stdin.write_all(script.as_bytes()));
    let output = python.wait_with_output().ok()?;
    writer.join().ok()?.ok()?;
    assert!(output.status.success(), "python3 failed");
    let mut rest = &output.stdout[..];
    let mut pickles = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk::<8>() {
        let (pickle, after) = after.split_at(u64::from_le_bytes(*length) as usize);
        pickles.push(pickle.to_vec());
        rest = after;
    }
    Some(pickles)
}

fn without_bytes(value: &Py) -> bool {
    match value {
        Py::Bytes(_) => false,
        Py::List(items) | Py::Tuple(items) => items.iter().all(without_bytes),
        Py::Dict(items) => items.iter().all(|(key, value)| without_bytes(key) && without_bytes(value)),
        _ => true,
    }
}

#[test]
fn what_python_pickles_is_read() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for protocol in 2..=5u8 {
        let mut given: Vec<Py> =
            (0..300).map(|_| values().new_tree(&mut runner).unwrap().current()).collect();
        // Lists and dicts are written in batches of 1000.
        given.push(Py::List((0..2500).map(Py::Int).collect()));
        given.push(Py::Dict((0..2500).map(|n| (Py::Int(n), Py::Str(n.to_string()))).collect()));
        if protocol == 2 {
            // There bytes need a call.
            given.retain(without_bytes);
        }
        let Some(pickles) = python_pickles(&given, protocol) else {
            eprintln!("there is no python3: not compared with what it writes");
            return;
        };
        assert_eq!(pickles.len(), given.len());
        for (value, pickle) in given.iter().zip(pickles) {
            assert_eq!(&read(&pickle).unwrap(), value, "protocol {protocol}");
        }
    }
}
