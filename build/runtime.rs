//! Which CUDA runtime a program gets: what `ARIL_CUDART` means to rustc.

/// The library to link for `static`, which is the default, or `shared`.
///
/// # Errors
/// A message, if it is neither.
pub(crate) fn library(choice: Option<&str>) -> Result<&'static str, String> {
    match choice.unwrap_or("static") {
        "static" => Ok("static=cudart_static"),
        "shared" => Ok("dylib=cudart"),
        other => Err(format!("ARIL_CUDART is `{other}`, which is neither `static` nor `shared`")),
    }
}
