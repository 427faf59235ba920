//! `--device`.

use std::{fmt, str::FromStr};

/// Where the model runs.
#[derive(Clone, Copy, Debug)]
pub enum DeviceArg {
    /// The CPU.
    Cpu,
    /// A GPU, by the driver's number.
    Cuda(usize),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(arg: &str) -> Result<Self, String> {
        let cuda = || arg.strip_prefix("cuda:")?.parse().ok();
        match arg {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => cuda().map(Self::Cuda).ok_or_else(|| "a device is cpu, cuda or cuda:N".into()),
        }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}
