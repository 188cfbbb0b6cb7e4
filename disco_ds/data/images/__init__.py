"""From bytes to images and captions, and their augmentation on the device."""
