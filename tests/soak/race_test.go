//go:build race

package soak

func init() { raced = true }
