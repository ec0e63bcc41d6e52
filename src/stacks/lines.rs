//! Which source line an instruction belongs to: decoders of CPython's three line tables.
//!
//! Must not know where the bytes come from. Invariant: any bytes give an answer, never a panic or an
//! endless loop, because the table is read out of a live process without its lock.
#![deny(unsafe_code)]

use super::python_layout::LineFormat;

/// The line of the instruction at byte `offset`; `None` where the table says that it has none.
pub fn line_at(format: LineFormat, table: &[u8], first_line: i32, offset: i32) -> Option<i32> {
    if offset < 0 {
        return Some(first_line);
    }
    match format {
        LineFormat::Lnotab => Some(lnotab(table, first_line, i64::from(offset))),
        LineFormat::Pep626 => pep626(table, first_line, i64::from(offset)),
        LineFormat::Locations => locations(table, first_line, i64::from(offset)),
    }
}

fn lnotab(table: &[u8], first_line: i32, offset: i64) -> i32 {
    let (mut address, mut line) = (0i64, first_line);
    for pair in table.chunks_exact(2) {
        address += i64::from(pair[0]);
        if address > offset {
            break;
        }
        line = line.wrapping_add(i32::from(pair[1] as i8));
    }
    line
}

fn pep626(table: &[u8], first_line: i32, offset: i64) -> Option<i32> {
    const NO_LINE: i8 = -128;
    let (mut end, mut line) = (0i64, first_line);
    for pair in table.chunks_exact(2) {
        end += i64::from(pair[0]);
        let step = pair[1] as i8;
        if step != NO_LINE {
            line = line.wrapping_add(i32::from(step));
        }
        if offset < end {
            return (step != NO_LINE).then_some(line);
        }
    }
    None
}

fn locations(table: &[u8], first_line: i32, offset: i64) -> Option<i32> {
    let mut bytes = table.iter().copied().peekable();
    let (mut end, mut line) = (0i64, first_line);
    while let Some(head) = bytes.next() {
        let kind = (head >> 3) & 15;
        end += (i64::from(head & 7) + 1) * 2;
        match kind {
            13 | 14 => line = line.wrapping_add(signed_varint(&mut bytes)),
            10..=12 => line = line.wrapping_add(i32::from(kind) - 10),
            _ => {}
        }
        if offset < end {
            return (kind != 15).then_some(line);
        }
        // The columns, which nobody asked for: up to the next byte that begins an entry.
        while bytes.next_if(|byte| byte & 0x80 == 0).is_some() {}
    }
    None
}

fn signed_varint(bytes: &mut impl Iterator<Item = u8>) -> i32 {
    let (mut value, mut shift) = (0u32, 0u32);
    for byte in bytes {
        value |= u32::from(byte & 63).checked_shl(shift).unwrap_or(0);
        shift += 6;
        if byte & 64 == 0 {
            break;
        }
    }
    let magnitude = (value >> 1) as i32;
    if value & 1 == 1 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lnotab_steps() {
        // line 1 at 0, line 2 at 6, line 52 at 50 (two pairs, because a step is a signed byte)
        let table = [6, 1, 44, 25, 0, 25];
        let line = |offset| line_at(LineFormat::Lnotab, &table, 1, offset).unwrap();
        assert_eq!([line(0), line(4), line(6), line(48), line(50), line(500)], [1, 1, 2, 2, 52, 52]);
        assert_eq!(line_at(LineFormat::Lnotab, &[2, 0xff], 9, 2), Some(8));
    }

    #[test]
    fn pep626_ranges() {
        let table = [4, 0, 2, 0x80, 6, 3, 2, 0xfe];
        let line = |offset| line_at(LineFormat::Pep626, &table, 10, offset);
        assert_eq!(
            [line(0), line(4), line(6), line(12), line(14), line(-1)],
            [Some(10), None, Some(13), Some(11), None, Some(10)]
        );
    }

    #[test]
    fn location_table_entries() {
        let table = [
            0x80 | (15 << 3),     // no location, 1 unit
            0x80 | (13 << 3) | 1, // no columns, 2 units, line −3 (svarint 7)
            7,
            0x80 | (11 << 3), // one line on, columns
            1,
            2,
            0x80 | (14 << 3) | 7, // long form, 8 units, +70 (svarint 140 = 12, 2)
            64 | 12,
            2,
            0,
            1,
            1,
            0x80 | 3, // short form, same line
            0,
        ];
        let line = |offset| line_at(LineFormat::Locations, &table, 100, offset);
        assert_eq!(
            [line(0), line(2), line(4), line(6), line(8), line(22), line(24), line(99)],
            [None, Some(97), Some(97), Some(98), Some(168), Some(168), Some(168), None]
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(table in proptest::collection::vec(any::<u8>(), 0..64),
                                  first in any::<i32>(), offset in any::<i32>()) {
            for format in [LineFormat::Lnotab, LineFormat::Pep626, LineFormat::Locations] {
                line_at(format, &table, first, offset);
            }
        }
    }
}
