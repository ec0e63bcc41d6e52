//! Any bytes: read as a recording (pickle, trace, compressed), and what was read analysed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use strandline::replay::{clock, file, recorded, start};

fuzz_target!(|bytes: &[u8]| {
    let Ok(recording) = file::read(bytes) else { return };
    let steps = clock::steps(&recording);
    assert_eq!(steps.ends.len(), recording.devices.len());
    for device in &recording.devices {
        let start = start::before(device, &recording.streams);
        recorded::figures(device, &start, &recording.settings);
    }
});
