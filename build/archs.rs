//! What `ARIL_CUDA_ARCHS` means to nvcc.

/// The architectures of the devices that the kernels are compiled for by default, as far as an nvcc that says this of its version has them.
pub(crate) fn usual(version: &str) -> &'static str {
    let numbers = version.split_once("release ").map_or("", |(_, numbers)| numbers);
    let mut numbers = numbers.split(['.', ',']).map_while(|number| number.parse::<u32>().ok());
    let families_since = (12, 9);
    if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= families_since {
        "80;90a;100f;120f"
    } else {
        "80;90a"
    }
}

/// The flags for a list such as `80;90a`: code for each architecture, and PTX of the newest for those to come.
///
/// An architecture is a number from 80 on. Behind it, `a` names that architecture alone, and `f`, from 100 on, its family.
///
/// # Errors
/// A message, if the list is empty or an entry is no such architecture.
pub(crate) fn gencodes(archs: &str) -> Result<Vec<String>, String> {
    let archs: Vec<&str> = archs.split([';', ',']).map(str::trim).filter(|arch| !arch.is_empty()).collect();
    let numbers = archs.iter().map(|arch| number(arch)).collect::<Result<Vec<_>, _>>()?;
    let newest = numbers.into_iter().max().ok_or("ARIL_CUDA_ARCHS names no architecture; write it like `80;90a`")?;
    let mut flags: Vec<_> = archs.iter().map(|arch| format!("-gencode=arch=compute_{arch},code=sm_{arch}")).collect();
    flags.push(format!("-gencode=arch=compute_{newest},code=compute_{newest}"));
    Ok(flags)
}

/// The number of an architecture, without its suffix.
fn number(arch: &str) -> Result<u32, String> {
    const OLDEST: u32 = 80;
    const OLDEST_FAMILY: u32 = 100;
    let (digits, oldest) = match arch.strip_suffix('f') {
        Some(digits) => (digits, OLDEST_FAMILY),
        None => (arch.strip_suffix('a').unwrap_or(arch), OLDEST),
    };
    // `parse` would take a sign, too.
    let number = digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
    number.filter(|&number| number >= oldest).ok_or_else(|| {
        format!("ARIL_CUDA_ARCHS names `{arch}`, which is none of 80 and newer, 90a and newer, 100f and newer")
    })
}
