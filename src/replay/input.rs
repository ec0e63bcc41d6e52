//! Bytes in order, with their place in the file: what every reader of recordings reads from.
//!
//! Must not know: any format.
//! Invariant: memory grows with bytes that were really there, never with a length that the file claims.

use super::error::{Error, Result};
use std::io::{ErrorKind, Read};

const BUFFER: usize = 1 << 16;

/// A buffered reader that knows its offset.
pub struct Input<R> {
    inner: R,
    buffer: Box<[u8]>,
    at: usize,
    filled: usize,
    /// Bytes of the file before `buffer`.
    before: u64,
}

impl<R: Read> Input<R> {
    pub fn new(inner: R) -> Input<R> {
        Input { inner, buffer: vec![0; BUFFER].into_boxed_slice(), at: 0, filled: 0, before: 0 }
    }

    /// How many bytes were taken so far.
    #[inline]
    pub fn offset(&self) -> u64 {
        self.before + self.at as u64
    }

    /// The next `count` bytes without taking them; fewer at the end of the file.
    pub fn peek(&mut self, count: usize) -> Result<&[u8]> {
        let count = count.min(BUFFER);
        while self.filled - self.at < count && self.fill()? {}
        Ok(&self.buffer[self.at..self.filled.min(self.at + count)])
    }

    /// The next byte; `within` names what is being read, for the message if the file ends here.
    #[inline]
    pub fn byte(&mut self, within: &'static str) -> Result<u8> {
        if self.at == self.filled && !self.fill()? {
            return Err(Error::Cut { offset: self.offset(), within });
        }
        let byte = self.buffer[self.at];
        self.at += 1;
        Ok(byte)
    }

    /// The next `N` bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self, within: &'static str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        if let Some(here) = self.buffer[self.at..self.filled].first_chunk::<N>() {
            bytes = *here;
            self.at += N;
        } else {
            for byte in &mut bytes {
                *byte = self.byte(within)?;
            }
        }
        Ok(bytes)
    }

    /// Appends the next `length` bytes to `out`.
    pub fn append_to(&mut self, mut length: u64, out: &mut Vec<u8>, within: &'static str) -> Result<()> {
        while length > 0 {
            if self.at == self.filled && !self.fill()? {
                return Err(Error::Cut { offset: self.offset(), within });
            }
            let here = ((self.filled - self.at) as u64).min(length) as usize;
            out.extend_from_slice(&self.buffer[self.at..self.at + here]);
            self.at += here;
            length -= here as u64;
        }
        Ok(())
    }

    /// The next line without its end, at most `limit` bytes of it.
    pub fn line(&mut self, limit: usize, within: &'static str) -> Result<Vec<u8>> {
        let mut line = Vec::new();
        while line.len() < limit {
            match self.byte(within)? {
                b'\n' => break,
                byte => line.push(byte),
            }
        }
        Ok(line)
    }

    /// Reads more; false at the end of the file.
    #[cold]
    fn fill(&mut self) -> Result<bool> {
        self.buffer.copy_within(self.at..self.filled, 0);
        self.before += self.at as u64;
        self.filled -= self.at;
        self.at = 0;
        loop {
            match self.inner.read(&mut self.buffer[self.filled..]) {
                Ok(count) => {
                    self.filled += count;
                    return Ok(count > 0);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A compressed file that was cut: what came before is all there is.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(false),
                Err(error) => return Err(Error::Io { offset: self.before + self.filled as u64, error }),
            }
        }
    }
}

impl<R: Read> Read for Input<R> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        if self.at == self.filled
            && let Err(Error::Io { error, .. }) = self.fill()
        {
            return Err(error);
        }
        let count = out.len().min(self.filled - self.at);
        out[..count].copy_from_slice(&self.buffer[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives one byte at a time.
    struct Slow<'a>(&'a [u8]);

    impl Read for Slow<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let count = self.0.len().min(out.len()).min(1);
            out[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    #[test]
    fn counts_what_it_takes() {
        let mut input = Input::new(Slow(b"ab\x01\x02\x03\x04line\nrest"));
        assert_eq!(input.peek(3).unwrap(), b"ab\x01");
        assert_eq!(input.byte("x").unwrap(), b'a');
        assert_eq!(input.byte("x").unwrap(), b'b');
        assert_eq!(input.array::<4>("x").unwrap(), [1, 2, 3, 4]);
        assert_eq!(input.offset(), 6);
        assert_eq!(input.line(100, "x").unwrap(), b"line");
        let mut out = Vec::new();
        assert!(matches!(
            input.append_to(5, &mut out, "five"),
            Err(Error::Cut { offset: 15, within: "five" })
        ));
        assert_eq!(input.peek(1).unwrap(), b"");
    }
}
