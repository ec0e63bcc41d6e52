//! Native frames of the own thread.
pub struct Unwinder;
impl Unwinder {
    pub fn new() -> Unwinder {
        Unwinder
    }
}
