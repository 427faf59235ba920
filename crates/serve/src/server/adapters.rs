//! The adapters: listing, loading and unloading them, with the endpoints of vLLM.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use aril::{
    DType,
    adapter::{Adapter, AdapterError, Opener},
    pool::{Source, Tier},
};
use aril_engine::Failure;
use aril_requests::registry::{OnDuplicate, RegistryError, Served, Version as _};
use axum::{
    Json,
    extract::{Path as UrlPath, State},
};
use half::{bf16, f16};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Loaded, Server, Shared, body,
    error::{ApiError, ApiResult},
    root::Root,
    warnings::Folder,
};
use crate::error::Result;

/// The body of `/v1/load_lora_adapter`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Load {
    #[serde(default)]
    lora_name: String,
    #[serde(default)]
    lora_path: PathBuf,
    #[serde(default)]
    load_inplace: bool,
    /// The form of an adapter of experts is known from its tensors, so both values are right.
    #[serde(rename = "is_3d_lora_weight")]
    _is_3d_lora_weight: Option<bool>,
    /// There is one base model.
    #[serde(rename = "base_model_name")]
    _base_model_name: Option<String>,
    /// SGLang's: whether the adapter stays on the device.
    pinned: Option<bool>,
}

/// The body of `/v1/unload_lora_adapter`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unload {
    #[serde(default)]
    lora_name: String,
    /// vLLM's number of the adapter, which it does not look at.
    #[serde(rename = "lora_int_id")]
    _lora_int_id: Option<i64>,
}

/// `POST /v1/load_lora_adapter`
pub(crate) async fn load(State(server): Shared, received: body::Received) -> ApiResult<String> {
    let Load { lora_name: name, lora_path: path, load_inplace, pinned, .. } = body::parse_told(received)?;
    let Some(root) = &server.lora_root else {
        return Err(ApiError::not_found("Adapters cannot be loaded: the server was started without --lora-root."));
    };
    if name.is_empty() || path.as_os_str().is_empty() {
        return Err(ApiError::invalid_input("Both 'lora_name' and 'lora_path' must be provided."));
    }
    let on_duplicate = if load_inplace { OnDuplicate::Replace } else { OnDuplicate::Refuse };
    let (dir, opener) = (root.folder(&path)?, root.opener());
    let warnings = server.load(&name, dir, opener, on_duplicate, pinned == Some(true)).await?;
    let warnings = warnings.into_iter().map(|warning| format!(" Warning: {warning}."));
    Ok(format!("Success: LoRA adapter '{name}' added successfully.{}", warnings.collect::<String>()))
}

/// `POST /v1/unload_lora_adapter`
pub(crate) async fn unload(State(server): Shared, received: body::Received) -> ApiResult<String> {
    let Unload { lora_name: name, .. } = body::parse_told(received)?;
    if server.lora_root.is_none() {
        return Err(ApiError::not_found("Adapters cannot be unloaded: the server was started without --lora-root."));
    }
    if name.is_empty() {
        return Err(ApiError::invalid_input("'lora_name' needs to be provided to unload a LoRA adapter."));
    }
    let unloaded = server.registry.unload(&name).map_err(|error| match error {
        RegistryError::Unknown { .. } => ApiError::not_found(format!("The lora adapter '{name}' cannot be found.")),
        other => ApiError::invalid_input(other.to_string()),
    })?;
    unloaded.versions.into_iter().for_each(|version| server.forget(version));
    tracing::info!(name, "unloaded an adapter");
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}

/// `GET /v1/models`
pub(crate) async fn list(State(server): Shared) -> ApiResult<Json<Value>> {
    Ok(Json(json!({ "object": "list", "data": server.models().await? })))
}

/// `GET /v1/models/{id}`
pub(crate) async fn one(State(server): Shared, UrlPath(name): UrlPath<String>) -> ApiResult<Json<Value>> {
    let model = server.models().await?.into_iter().find(|model| model["id"] == *name);
    model.map(Json).ok_or_else(|| ApiError::no_model(&name))
}

impl Server {
    /// The base model and the adapters, as OpenAI describes models.
    pub(super) async fn models(&self) -> ApiResult<Vec<Value>> {
        let server = self;
        let report = server.engine.report().await.ok_or_else(ApiError::ended)?;
        let model = |id: &str, root: &Path, parent: Option<&str>| {
            json!({
                "id": id,
                "object": "model",
                "created": server.created,
                "owned_by": "aril",
                "root": root,
                "parent": parent,
                "max_model_len": server.max_positions,
            })
        };
        let base = server.names.iter().map(|name| model(name, &server.model, None));
        let loaded = server.loaded();
        let adapters = server.registry.list().into_iter().map(|adapter| {
            let root = loaded.get(&adapter.id).map_or(Path::new(""), |loaded| &loaded.folder);
            let mut model = model(&adapter.name, root, server.names.first().map(String::as_str));
            // Not in OpenAI's API: the fastest memory that the adapter is in, which is the host's if it was loaded
            // since the report.
            model["tier"] = match report.tiers.get(&adapter.id) {
                Some(Tier::Device) => "device".into(),
                Some(Tier::Source) => "source".into(),
                _ => "host".into(),
            };
            let versions = [adapter.id].into_iter().chain(adapter.older);
            model["versions"] = versions.map(|version| version.get()).collect();
            model
        });
        Ok(base.chain(adapters).collect())
    }

    /// Loads an adapter and serves it under a name, or in place of the version that has it. Returns what in its folder
    /// has no effect.
    pub(crate) async fn load(
        self: &Arc<Self>,
        name: &str,
        dir: PathBuf,
        opener: Opener,
        on_duplicate: OnDuplicate,
        is_pinned: bool,
    ) -> ApiResult<Vec<String>> {
        self.check_name(name)?;
        let pending = self.registry.begin_load(name, on_duplicate).map_err(|error| match error {
            RegistryError::Loaded { .. } => ApiError::invalid_input(format!(
                "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set \
                 'load_inplace' to True."
            )),
            other => ApiError::invalid_input(other.to_string()),
        })?;
        let server = Arc::clone(self);
        let folder = dir.clone();
        let of_source = opener.clone();
        let source = tokio::task::spawn_blocking(move || {
            let source = server.source(&folder, of_source.clone())?;
            let folder = Folder { path: folder, opener: of_source };
            match source.has_trained_rows().then(|| server.of_tokens(&folder)).flatten() {
                Some(tokens) => {
                    Err(ApiError::bad_request(format!("The adapter has trained rows of tokens, and {tokens}.")))
                }
                None => Ok(source),
            }
        })
        .await;
        let source = source.map_err(|_| ApiError::internal("The thread that read the adapter has panicked."))??;
        self.check_rank(&source)?;
        // The folder is looked at while the weights are read.
        let (server, folder) = (Arc::clone(self), Folder { path: dir.clone(), opener });
        let warnings = tokio::task::spawn_blocking(move || server.warnings(&folder));
        let version = self.engine.load(source.clone(), is_pinned).await.ok_or_else(ApiError::ended)?;
        let version =
            version.map_err(|error| ApiError::bad_request(self.cut(aril_engine::sentence(&error), Some(&dir))))?;
        let id = version.id();
        self.loaded().insert(id, Loaded { folder: dir.as_path().into(), source });
        let replaced = pending.serve(version).map_err(|error| {
            self.loaded().remove(&id);
            ApiError::invalid_input(error.to_string())
        })?;
        replaced.version.into_iter().for_each(|old| self.forget(old));
        tracing::info!(name, path = %dir.display(), "loaded an adapter");
        let warnings =
            warnings.await.map_err(|_| ApiError::internal("The thread that read the folder has panicked."))?;
        for warning in &warnings {
            tracing::warn!(name, warning, "a part of an adapter has no effect");
        }
        Ok(warnings)
    }

    /// Refuses an adapter of a larger rank than the engine's tables take.
    pub(super) fn check_rank(&self, source: &Source) -> ApiResult<()> {
        let (rank, max) = (source.max_rank(), self.max_rank);
        if rank > max {
            return Err(ApiError::bad_request(format!("LoRA rank {rank} is greater than max_lora_rank {max}.")));
        }
        Ok(())
    }

    /// The error of a request that the engine does not answer, on an adapter of this folder.
    pub(super) fn failed(&self, failure: &Failure, folder: Option<&Path>) -> ApiError {
        let message = failure.to_string();
        match failure {
            Failure::QueueFull { .. } => ApiError::unavailable(format!("The server is busy: {message}.")),
            Failure::Cache { .. } => ApiError::bad_request(message),
            Failure::Unloaded => ApiError::not_found("The adapter was unloaded.").of("model"),
            Failure::Adapter(_) | Failure::Admission(_) | Failure::NotNumbers | Failure::Step(_) => {
                tracing::error!(message, "a request has failed");
                ApiError::internal(self.cut(message, folder))
            }
        }
    }

    /// A text in which files are named as clients name them: not where the server has its folders.
    pub(super) fn cut(&self, text: String, folder: Option<&Path>) -> String {
        let places = [self.lora_root.as_ref().map(Root::path), folder.and_then(Path::parent)];
        places.into_iter().flatten().fold(text, |text, place| text.replace(&format!("{}/", place.display()), ""))
    }

    /// The one name that says what answers a request: that in `model`, which is the base model's where the request does
    /// not say. With `--enable-lora-path`, `lora_path` beside the base model's name and `base:adapter` name an adapter,
    /// too, as in SGLang.
    pub(super) fn name_of(&self, model: Option<String>, lora_path: Option<String>) -> ApiResult<String> {
        let given = |name: Option<String>| name.filter(|name| !name.is_empty());
        let base = || self.names.first().cloned().unwrap_or_default();
        let (model, lora_path) = (given(model).unwrap_or_else(base), given(lora_path));
        if !self.takes_lora_path {
            return match lora_path {
                None => Ok(model),
                Some(_) => Err(ApiError::bad_request(
                    "`lora_path` is not taken: `model` names the adapter, unless the server has --enable-lora-path.",
                )
                .of("lora_path")),
            };
        }
        let named = self.beside_base(&model).unwrap_or(&model);
        let is_base = named.is_empty() || self.names.iter().any(|base| base == named);
        match lora_path {
            None if named.is_empty() => Ok(base()),
            None => Ok(named.to_owned()),
            Some(path) if is_base || path == named => Ok(path),
            Some(_) => {
                Err(ApiError::bad_request("`model` names an adapter, and `lora_path` another one.").of("lora_path"))
            }
        }
    }

    /// The adapter that SGLang's `base:adapter` names, unless it is a name of the base model.
    fn beside_base<'n>(&self, name: &'n str) -> Option<&'n str> {
        let beside = |base: &String| name.strip_prefix(base.as_str())?.strip_prefix(':');
        if self.names.iter().any(|base| base == name) {
            return None;
        }
        // Names of the base model may begin with each other.
        self.names.iter().filter_map(beside).min_by_key(|adapter| adapter.len())
    }

    /// What a name stands for; `None` if its adapter is to be loaded for this request.
    pub(super) fn resolve_or_find(&self, name: &str) -> ApiResult<Option<Served>> {
        match self.resolve(name) {
            Err(_) if self.is_findable(name) => Ok(None),
            served => served.map(Some),
        }
    }

    /// What a name stands for.
    pub(super) fn resolve(&self, name: &str) -> ApiResult<Served> {
        self.registry.resolve(name).map_err(|error| match error {
            RegistryError::Loading { .. } => ApiError::unavailable(format!("The model `{name}` is being loaded.")),
            _ if !self.takes_lora_path && self.beside_base(name).is_some() => ApiError::not_found(format!(
                "The model `{name}` does not exist: `base:adapter` names an adapter if the server has \
                 --enable-lora-path."
            ))
            .of("model"),
            _ => ApiError::no_model(name),
        })
    }

    /// Refuses the name of an adapter that would be read as something else.
    pub(super) fn check_name(&self, name: &str) -> ApiResult<()> {
        if name.contains(',') {
            return Err(ApiError::invalid_input(format!("'{name}' has a comma, which separates names in metrics.")));
        }
        if self.takes_lora_path && self.beside_base(name).is_some() {
            return Err(ApiError::invalid_input(format!(
                "'{name}' names an adapter beside the base model (--enable-lora-path)."
            )));
        }
        Ok(())
    }

    /// Reads an adapter's configuration and the headers of its weights, and compares copies of base weights with the
    /// model's.
    fn source(&self, dir: &Path, opener: Opener) -> ApiResult<Source> {
        let (model, dtype) = (&self.described.model, self.dtype);
        match Source::directory_with(dir, opener.clone(), model, dtype) {
            // A pool compares no base weights, so this adapter stays in memory.
            Err(AdapterError::BaseWeight { .. }) => {}
            source => return source.map_err(|error| self.refuse(&error, dir)),
        }
        let mut adapter = Adapter::open_with(dir, &opener).map_err(|error| self.refuse(&error, dir))?;
        let compared = adapter.compare_base_weights(|weight| -> Result<bool> {
            match dtype {
                DType::BF16 => self.checkpoint.has::<bf16>(weight, model, self.tied),
                DType::F16 => self.checkpoint.has::<f16>(weight, model, self.tied),
                _ => self.checkpoint.has::<f32>(weight, model, self.tied),
            }
        });
        compared.map_err(|error| ApiError::bad_request(self.cut(error.to_string(), Some(dir))))?;
        Source::memory(adapter.into(), model, dtype).map_err(|error| self.refuse(&error, dir))
    }

    /// The error of an adapter that cannot be served.
    fn refuse(&self, error: &AdapterError, dir: &Path) -> ApiError {
        let message = self.cut(error.to_string(), Some(dir));
        match error {
            AdapterError::NoConfig { .. } | AdapterError::NoWeights { .. } => {
                ApiError::not_found(format!("No adapter found: {message}."))
            }
            AdapterError::Read { error, .. } => ApiError::of_file(error, message),
            _ => ApiError::bad_request(message),
        }
    }
}
