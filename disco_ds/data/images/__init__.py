"""Decoding of images and captions from bytes, and augmentation of images on the device."""
