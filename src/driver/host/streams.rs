//! Streams and events in software.
//!
//! A stream is a count of pieces of work sent and done. A stream that nobody submitted work to has none
//! outstanding, so every event is done at once: that is how host memory is used in earnest. Work may wait
//! for another stream's event. Invariant: work of one stream completes in order.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::driver::{DriverError, Event, Result, Stream};

/// CUDA's code for a call that a capture forbids (`CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`).
const CAPTURING: i32 = 900;
/// CUDA's code for an unknown event (`CUDA_ERROR_INVALID_HANDLE`).
const INVALID_HANDLE: i32 = 400;

/// A point in a stream's work: all of the first `upto` pieces.
#[derive(Clone, Copy)]
struct Point {
    stream: Stream,
    upto: u64,
}

#[derive(Default)]
struct Line {
    /// Pieces of work sent, waits included.
    sent: u64,
    done: u64,
    capturing: bool,
    /// Which pieces are waits, in order, and for what. A wait is done by itself.
    waits: VecDeque<(u64, Point)>,
}

#[derive(Default)]
pub(super) struct Streams {
    lines: HashMap<Stream, Line>,
    /// An event of the whole device has a point in every stream.
    events: HashMap<u64, Vec<Point>>,
    last_event: u64,
    pub(super) violations: u64,
}

impl Streams {
    pub(super) fn submit(&mut self, stream: Stream) {
        self.lines.entry(stream).or_default().sent += 1;
    }

    pub(super) fn outstanding(&self, stream: Stream) -> u64 {
        self.lines.get(&stream).map_or(0, |line| line.sent - line.done - line.waits.len() as u64)
    }

    pub(super) fn events(&self) -> usize {
        self.events.len()
    }

    pub(super) fn complete(&mut self, stream: Stream, n: u64) -> u64 {
        let mut completed = 0;
        while completed < n && self.outstanding(stream) > 0 {
            self.pass_waits();
            let Some(line) = self.lines.get_mut(&stream) else { break };
            if line.waits.front().is_some_and(|wait| wait.0 == line.done) {
                break;
            }
            line.done += 1;
            completed += 1;
        }
        completed
    }

    /// Passes every wait that comes next in its stream and is over, until none is left.
    fn pass_waits(&mut self) {
        loop {
            let over = self.lines.iter().find_map(|(&stream, line)| {
                let &(index, point) = line.waits.front()?;
                (index == line.done && self.reached(point)).then_some(stream)
            });
            let Some(line) = over.and_then(|stream| self.lines.get_mut(&stream)) else { return };
            line.waits.pop_front();
            line.done += 1;
        }
    }

    pub(super) fn set_capturing(&mut self, stream: Stream, on: bool) {
        self.lines.entry(stream).or_default().capturing = on;
    }

    pub(super) fn is_capturing(&self, stream: Stream) -> bool {
        self.lines.get(&stream).is_some_and(|line| line.capturing)
    }

    fn reached(&self, point: Point) -> bool {
        self.lines.get(&point.stream).is_none_or(|line| line.done >= point.upto)
    }

    fn forbidden<T>(&mut self, call: &'static str) -> Result<T> {
        self.violations += 1;
        Err(DriverError::Failed { call, code: CAPTURING })
    }

    fn points(&mut self, event: Event, call: &'static str) -> Result<Vec<Point>> {
        match self.events.get(&event.0).cloned() {
            Some(points) => Ok(points),
            None => {
                self.violations += 1;
                Err(DriverError::Failed { call, code: INVALID_HANDLE })
            }
        }
    }

    fn any_capturing(&self) -> bool {
        self.lines.values().any(|line| line.capturing)
    }

    pub(super) fn record(&mut self, stream: Stream) -> Result<Event> {
        if self.is_capturing(stream) {
            return self.forbidden("record_event");
        }
        let upto = self.lines.get(&stream).map_or(0, |line| line.sent);
        Ok(self.event(vec![Point { stream, upto }]))
    }

    /// An event behind all work of all streams.
    pub(super) fn record_all(&mut self) -> Result<Event> {
        if self.any_capturing() {
            return self.forbidden("record_device_event");
        }
        let points = self.lines.iter().map(|(&stream, line)| Point { stream, upto: line.sent }).collect();
        Ok(self.event(points))
    }

    fn event(&mut self, points: Vec<Point>) -> Event {
        self.last_event += 1;
        self.events.insert(self.last_event, points);
        Event(self.last_event)
    }

    fn captured(&self, points: &[Point]) -> bool {
        points.iter().any(|point| self.is_capturing(point.stream))
    }

    pub(super) fn query(&mut self, event: Event) -> Result<bool> {
        let points = self.points(event, "query_event")?;
        if self.captured(&points) {
            return self.forbidden("query_event");
        }
        self.pass_waits();
        Ok(points.into_iter().all(|point| self.reached(point)))
    }

    pub(super) fn wait(&mut self, event: Event) -> Result<()> {
        let points = self.points(event, "wait_event")?;
        if self.captured(&points) {
            return self.forbidden("wait_event");
        }
        for point in points {
            self.run_to(point);
        }
        Ok(())
    }

    pub(super) fn release(&mut self, event: Event) -> Result<()> {
        self.points(event, "release_event")?;
        self.events.remove(&event.0);
        Ok(())
    }

    pub(super) fn stream_wait(&mut self, stream: Stream, event: Event) -> Result<()> {
        let points = self.points(event, "stream_wait_event")?;
        if self.is_capturing(stream) || self.captured(&points) {
            return self.forbidden("stream_wait_event");
        }
        self.pass_waits();
        for point in points {
            if !self.reached(point) && point.stream != stream {
                let line = self.lines.entry(stream).or_default();
                line.waits.push_back((line.sent, point));
                line.sent += 1;
            }
        }
        Ok(())
    }

    pub(super) fn synchronize(&mut self, stream: Stream) -> Result<()> {
        if self.is_capturing(stream) {
            return self.forbidden("synchronize_stream");
        }
        let upto = self.lines.get(&stream).map_or(0, |line| line.sent);
        self.run_to(Point { stream, upto });
        Ok(())
    }

    pub(super) fn synchronize_all(&mut self) -> Result<()> {
        if self.any_capturing() {
            return self.forbidden("synchronize_device");
        }
        for line in self.lines.values_mut() {
            line.done = line.sent;
            line.waits.clear();
        }
        Ok(())
    }

    /// Runs work until the point is reached, and the work of other streams that it waits for.
    fn run_to(&mut self, point: Point) {
        while let Some(line) = self.lines.get_mut(&point.stream)
            && line.done < point.upto
        {
            match line.waits.front().copied() {
                Some((index, other)) if index == line.done => {
                    line.waits.pop_front();
                    line.done += 1;
                    self.run_to(other);
                }
                Some((index, _)) => line.done = point.upto.min(index),
                None => line.done = point.upto,
            }
        }
    }
}
