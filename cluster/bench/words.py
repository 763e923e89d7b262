"""Common words, most of them one token of most tokenizers."""

_TEXT = """
time people way water day part place work week case point company number group problem fact hand
year eye life child world school state family student country night house area money story month
lot right study book job word business issue side kind head service friend father power hour
game line end member law car city community name president team minute idea body information
back parent face level office door health person art war history party result change morning
reason research girl guy moment air teacher force education foot boy age policy music market
sense nation plan college interest death experience effect use class control field development
role effort rate heart drug show leader light voice wife police mind price report decision son
view relationship town road arm difference value building action season society tax director
position player record paper space ground form event official matter center couple site project
activity star table need court oil situation cost industry figure street image phone data
picture practice piece land product
"""
WORDS = tuple(_TEXT.split())
