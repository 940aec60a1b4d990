"""An example job: a ResNet with batch norm on pictures that it draws itself."""
