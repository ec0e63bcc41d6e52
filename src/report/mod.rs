//! The report model and its forms.
#![forbid(unsafe_code)]
